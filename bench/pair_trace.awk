# Pairs what `trace-cmd report -t` prints: VALUE COUNT TOTAL_NS a line. Written against trace-cmd's text alone, so that
# it is a witness for waitfold.
#   postgres-12795 [000] 14842.880483146: w:  (55f6921b2c19) v=0x6000000
#   postgres-12795 [000] 14842.890483146: sched_process_exit:  comm=postgres pid=12795 ...
{
    tid = $1
    sub(/.*-/, "", tid)
}
$4 == "sched_process_exit:" { delete value[tid] }
$4 == "w:" {
    split($3, at, /[.:]/)
    ns = at[1] * 1000000000 + at[2]
    if (tid in value) {
        count[value[tid]]++
        total[value[tid]] += ns - since[tid]
    }
    since[tid] = ns
    if ($6 == "v=0x0")
        delete value[tid]
    else
        value[tid] = $6
}
END {
    for (v in count)
        printf "%s %d %.0f\n", substr(v, 3), count[v], total[v]
}
