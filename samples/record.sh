#!/usr/bin/env bash
# record.sh - record one of the samples again.
#
# usage: samples/record.sh NAME [CAPTURE]
#
# NAME is a folder of samples/. A throw-away PostgreSQL of its own (the newest under
# /usr/lib/postgresql, on a unix socket) is set up as the sample wants it, driven, recorded and removed.
# Writes samples/NAME/NAME.waitfold, and keeps the whole capture in the new folder CAPTURE where one is named.
# Figures differ from host to host.
#
# cost: half a minute of both CPUs of a small machine; 1 GB in $TMPDIR (default /tmp) meanwhile.
# needs: what `make deps` installs; root and uprobes.

# shellcheck disable=SC2317 # a sample's functions are called by its name
set -euo pipefail

# shellcheck source=bench/lib.bash
. "$(dirname "$(readlink -f "$0")")/../bench/lib.bash"

pgbench=(pgbench --no-vacuum --protocol=prepared)

# Of each sample: pgbench's scale, the server's settings beside those of bench/lib.bash, what is recorded, what is
# done before (prepare) and meanwhile (load).
scale=1 settings=() with=all
prepare() { :; }

idle-server() {
    settings=('autovacuum = on')
    load() {
        psql -qc 'SELECT 1' -c '\! sleep 5' &
        psql -qc BEGIN -c 'SELECT count(*) FROM pgbench_branches' -c '\! sleep 4' -c COMMIT &
        wait
    }
}

lock-contention() {
    with=all,lock-wait
    prepare() {
        cat >"$WORK/till.sql" <<'END'
BEGIN;
UPDATE pgbench_branches SET bbalance = bbalance + 1 WHERE bid = 1;
\sleep 20 ms
UPDATE pgbench_tellers SET tbalance = tbalance + 1 WHERE tid = 1 + :client_id;
COMMIT;
END
    }
    load() { "${pgbench[@]}" -c 5 -T 5 -f "$WORK/till.sql"; }
}

cold-reads() {
    scale=10 settings=('shared_buffers = 2MB') with=all,buffer-read
    prepare() {
        sql CHECKPOINT
        find "$DATA/base" -type f -size +1M -exec dd if={} iflag=nocache count=0 status=none \;
    }
    load() { "${pgbench[@]}" -S -c 4 -R 150 -T 5; }
}

wal-bound() {
    prepare() {
        sql 'CREATE TABLE clicks (client int, clicked timestamptz)'
        echo 'INSERT INTO clicks VALUES (:client_id, now());' >"$WORK/click.sql"
    }
    load() { "${pgbench[@]}" -c 8 -R 600 -T 4 -f "$WORK/click.sql"; }
}

checkpoint-spike() {
    with=all,checkpoint
    # 700 MB that the kernel has and the disk has not: the checkpoint has to sync them.
    prepare() { sql "CREATE TABLE import AS SELECT n, repeat('x', 1000) AS x FROM generate_series(1, 600000) AS n"; }
    load() {
        "${pgbench[@]}" -N -c 6 -R 80 -T 6 &
        sleep 2
        sql CHECKPOINT
        wait
    }
}

# Each row is of a subtransaction of its own, and a transaction as old as the rows is still open, with more subtransactions
# than a snapshot has room for (64): readers look up pg_subtrans for each row.
lwlock-contention() {
    with=all,lwlock-wait
    prepare() {
        sql 'CREATE TABLE ledger (id int PRIMARY KEY, amount int)'
        mkfifo "$WORK/old"
        exec {OLD}<>"$WORK/old"
        psql -Xq <&"$OLD" >/dev/null &
        cat >&"$OLD" <<'END'
BEGIN;
DO $$ BEGIN FOR i IN 1..100 LOOP BEGIN INSERT INTO ledger VALUES (-i, 0); EXCEPTION WHEN unique_violation THEN END; END LOOP; END $$;
END
        sleep 1
        sql 'DO $$ BEGIN FOR i IN 1..120000 LOOP BEGIN INSERT INTO ledger VALUES (i, 0); EXCEPTION WHEN unique_violation THEN END; END LOOP; END $$'
        sql 'ANALYZE ledger'
        cat >"$WORK/read.sql" <<'END'
\set first random(1, 116000)
SELECT sum(amount) FROM ledger WHERE id BETWEEN :first AND :first + 4000;
END
    }
    load() { "${pgbench[@]}" -c 6 -T 3 -f "$WORK/read.sql"; }
}

[[ ${1-} != --help ]] || help
(($# == 1 || $# == 2)) || misused "give the name of a sample"
name=$1
[[ $(type -t "$name") == function && -d $ROOT/samples/$name ]] || misused "no sample is called \"$name\""
make_work
capture=$(realpath -- "${2-$WORK/capture}")
[[ ! -e $capture ]] || die "\"$2\" is there already"
"$name"
start_server "$scale" "${settings[@]}"
export PATH=$CLIENT:$PATH WORK CLIENT
prepare
export -f load sql
"$RECORD" -D "$DATA" --with "$with" -o "$capture" -- bash -c "$(declare -p pgbench); load" >"$WORK/load"
"$WAITFOLD" bundle "$capture" -o "$ROOT/samples/$name/$name.waitfold"
