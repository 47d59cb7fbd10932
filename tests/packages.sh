#!/usr/bin/env bash
# Installs what this project's demo, tests and benches need and this Debian or Ubuntu
# lacks. Needs root only when something is missing.
set -euo pipefail

missing=()
# need PACKAGE COMMAND-OR-FILE
need() {
    if [[ $2 == */* ]]; then [[ ! -e $2 ]] || return 0; else ! type -P "$2" >/dev/null || return 0; fi
    missing+=("$1")
}

need binutils objdump
need mawk mawk
need gawk gawk
need gcc gcc
need libc6-dev /usr/include/stdio.h
need systemtap-sdt-dev /usr/include/x86_64-linux-gnu/sys/sdt.h
need man-db man
need npm npm
need shellcheck shellcheck
need bpftrace bpftrace
need libdevel-nytprof-perl /usr/share/perl5/Devel/NYTProf/flamegraph.pl
compgen -G '/usr/lib/postgresql/*/bin/pgbench' >/dev/null || missing+=(postgresql postgresql-contrib)
python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
# shellcheck source=/dev/null
os=$(. /etc/os-release 2>/dev/null && echo "${ID-}") || true
# Ubuntu's is a snap: tests in a browser are skipped there.
[[ $os == ubuntu ]] || need chromium chromium
# Ubuntu's perf is a script that wants the tools of the very kernel; Debian's is one package.
if ! perf --version >/dev/null 2>&1; then
    if [[ $os == ubuntu ]]; then
        missing+=(linux-tools-common "linux-tools-$(uname -r)")
    else
        missing+=(linux-perf)
    fi
fi

((${#missing[@]})) || exit 0
if ((EUID != 0)) || ! type -P apt-get >/dev/null; then
    echo "missing here: ${missing[*]}; as root on Debian or Ubuntu: apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
