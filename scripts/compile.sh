#!/bin/sh
# Compiles what is installed in a directory, for /opt/kuberoll of an image: nobody can write there later, and every start
# would compile it again. Some packages ship templates that are no Python; they are never imported.
python -m compileall -q -j 0 -s "$1" -p /opt/kuberoll "$1/lib" >/dev/null 2>&1 || true
