"""What a capture is shown as: tables, folded stacks, rows. Each view is a function of intervals."""
