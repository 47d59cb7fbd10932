#!/usr/bin/env bash
# Builds a PostgreSQL with wait__event probes (probes/patches/), from the source of
# the distribution's own package, into build/usdt-postgres/. Installs what the build needs. As root
# on Debian or Ubuntu; takes three to six minutes.
#
# NOP5=1 builds into build/usdt-postgres-nop5/ a server whose probes are nops of five
# bytes, which Linux 6.18 and later replace by a call instead of a trap. That call writes below
# the stack pointer, where a leaf function may keep its variables: so without a red zone.
#
# PLAIN=1 builds the same into build/usdt-postgres-plain/ without these probes, to compare with.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$PWD/build/usdt-postgres
cflags='-O2 -fno-omit-frame-pointer'
if [[ ${NOP5-} == 1 ]]; then
    prefix+=-nop5
    cflags+=" -mno-red-zone -I$prefix.src/nop5"
fi
[[ ${PLAIN-} != 1 ]] || prefix+=-plain
source=$prefix.src

say() { echo "usdt-postgres: $*" >&2; }

say "installing what the build needs"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends build-essential bison flex pkg-config systemtap-sdt-dev \
    libreadline-dev zlib1g-dev libicu-dev libssl-dev libxml2-dev libxslt1-dev uuid-dev liblz4-dev libzstd-dev \
    libperl-dev python3-dev tcl-dev libipc-run-perl >/dev/null

# The source of the packages that are installed here. The system's apt need not have
# source archives configured: a private copy of its configuration has.
newest=$(printf '%s\n' /usr/lib/postgresql/*/bin/postgres | sort -V | tail -n 1)
[[ $newest =~ ^/usr/lib/postgresql/([0-9]+)/ ]] || {
    say "no PostgreSQL package is installed here: make deps installs one"
    exit 1
}
package=postgresql-${BASH_REMATCH[1]}
apt=$prefix.apt
rm -rf "$apt" "$source"
mkdir -p "$apt"/{parts,lists/partial,archives/partial} "$source"
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    case $file in
        *.sources) sed 's/^Types:.*/Types: deb-src/' "$file" ;;
        *.list) [[ ! -e $file ]] || sed -n 's/^deb /deb-src /p' "$file" ;;
        *) continue ;;
    esac >"$apt/parts/${file##*/}"
done
cat >"$apt/apt.conf" <<END
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$apt/parts";
Dir::State::Lists "$apt/lists";
Dir::Cache "$apt";
APT::Sandbox::User "root";
END
say "getting the source of $package"
# Archives without sources are no reason to stop here: the next command says what is missing.
APT_CONFIG=$apt/apt.conf apt-get update -q >/dev/null || true
# Only the original archive is used. Debian's patches are for its packages; one of them, 50-per-version-dirs, makes
# `make install` write into the system's folders, whatever the prefix.
# An archive may no longer have the version that is installed: then its newest.
version=$(dpkg-query -W -f '${source:Version}' "$package")
(cd "$apt" && export APT_CONFIG=$apt/apt.conf &&
    { apt-get source -q --download-only "$package=$version" || apt-get source -q --download-only "$package"; } >/dev/null)
tar -xf "$apt/$package"_*.orig.tar.* -C "$source" --strip-components 1
rm -rf "$apt"

[[ ${PLAIN-} == 1 ]] || patch --quiet --fuzz=0 -p1 -d "$source" <probes/patches/wait-event-probes.patch
if [[ ${NOP5-} == 1 ]]; then
    mkdir -p "$source/nop5/sys"
    printf '%s\n' '#include_next <sys/sdt.h>' '#undef _SDT_NOP' '#define _SDT_NOP .nops 5' >"$source/nop5/sys/sdt.h"
fi

say "building in $source (log: build.log)"
cd "$source"
# PostgreSQL's make leaves out generated headers where it believes itself called by a make that has made them.
unset MAKELEVEL MAKEFLAGS MFLAGS
# What fails in a list before || does not end the script: hence the chain.
{
    ./configure --prefix="$prefix" --enable-dtrace CFLAGS="$cflags" --with-openssl --with-libxml --with-libxslt \
        --with-uuid=e2fs --with-icu --with-lz4 --with-zstd --with-perl --with-python --with-tcl &&
        nice make -s -j"$(nproc)" world-bin &&
        rm -rf "$prefix" &&
        make -s install-world-bin
} >build.log 2>&1 || {
    tail -n 20 build.log >&2
    exit 1
}
say "built $("$prefix/bin/postgres" --version) in $prefix"
