#!/bin/sh
# Says in one sentence what this machine lacks for a build from source, before anything is
# installed. Usage: CXX=compiler tools/preflight.sh PYTHON
set -u
python=$1

fail() {
    printf 'trellis_ops: %s\n' "$1" >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || fail "builds on Linux only for now, this is $(uname -s)."

command -v "$python" >/dev/null 2>&1 ||
    fail "$python was not found; install Python 3.10 or newer, or name one: make PYTHON=python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "needs Python 3.10 or newer, $python is $("$python" -V 2>&1 | head -n 1); name one: make PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    fail "$python cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)."
# torch.compile compiles against it at run time.
header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
[ -f "$header" ] ||
    fail "$header is missing, which torch.compile needs (Debian, Ubuntu: apt install python3-dev)."

# CXX may hold a launcher and options too.
set -- ${CXX:-}
[ $# -gt 0 ] ||
    fail "no C++ compiler was found; install g++ (Debian, Ubuntu: apt install g++) or set CXX."
command -v "$1" >/dev/null 2>&1 || fail "the C++ compiler $1, named by CXX, was not found."
