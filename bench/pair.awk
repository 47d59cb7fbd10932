# Pairs what `perf script --ns --show-task-events -F pid,tid,time,event,trace` prints: VALUE COUNT
# TOTAL_NS a line. Written against perf's text alone, so that it is a witness for waitfold.
#   12/12  1055.776645746: waitfold_1:w: (562e1db96a20) v=0x1 postmaster=11
#   12/12  1055.786645746: PERF_RECORD_EXIT(12:12):(10:10)
{
    split($1, id, "/")
    tid = id[2]
}
$3 ~ /^PERF_RECORD_EXIT/ { delete value[tid] }
$5 ~ /^v=/ {
    split($2, at, /[.:]/)
    ns = at[1] * 1000000000 + at[2]
    # perf writes a few records twice.
    if (ns == since[tid] && $5 == before[tid])
        next
    before[tid] = $5
    if (tid in value) {
        count[value[tid]]++
        total[value[tid]] += ns - since[tid]
    }
    since[tid] = ns
    if ($5 == "v=0x0")
        delete value[tid]
    else
        value[tid] = $5
}
END {
    for (v in count)
        printf "%s %d %.0f\n", substr(v, 3), count[v], total[v]
}
