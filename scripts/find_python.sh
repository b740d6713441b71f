#!/bin/sh
# Prints the path of a Python 3.12 that can make a virtual environment, or says what to install.
# A name on the PATH is not enough: pyenv puts a `python3.12` there that may refuse to run.
# PYTHON=... in the environment is the only candidate where it is set.
set -u

usable() {
    "$1" -c '
import ensurepip, sys, venv
if sys.version_info[:2] == (3, 12):
    print(getattr(sys, "_base_executable", sys.executable))
' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    set -- "$PYTHON"
else
    set -- python3.12 python3 python "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python
fi
for candidate in "$@"; do
    found=$(usable "$candidate")
    if [ -n "$found" ]; then
        echo "$found"
        exit 0
    fi
done

echo "No Python 3.12 with its venv module runs here (tried: $*): install it (Debian, Ubuntu:" \
    "apt install python3.12 python3.12-venv; elsewhere: pyenv install 3.12), or name it in PYTHON=..." >&2
exit 1
