#!/bin/sh
# Compiles what is installed in an image: nobody can write there later, and every start would compile it again.
# Some packages ship templates that are no Python; they are never imported.
python -m compileall -q -j 0 /opt/kuberoll/lib >/dev/null 2>&1 || true
