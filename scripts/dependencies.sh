#!/bin/sh
# Installs what an image needs besides KubeRoll itself into /opt/kuberoll, for one layer of it: nothing else is left.
#
#   scripts/dependencies.sh [--without-engine] EXTRA...    # extras of pyproject.toml
#
# On dependencies of a layer below it adds what is missing.
set -eu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 UV_NO_CACHE=1
cd "$(dirname "$0")/.."
engine=
if [ "$1" = --without-engine ]; then
    engine=$1
    shift
fi
python3 -m venv /opt/kuberoll
if [ -n "$engine" ]; then
    # Of the tools that came with the environment; where something needs it, it is installed again.
    python -m pip uninstall --quiet --yes setuptools
fi
python scripts/requirements.py "$@" >requirements.txt
# shellcheck disable=SC2086 # none, or one word
python scripts/install.py $engine -r requirements.txt
if [ -z "$engine" ]; then
    # Triton is only for GPUs, and a quarter of the image.
    python -m pip uninstall --quiet --yes triton
fi
python -m pip uninstall --quiet --yes pip
scripts/compile.sh /opt/kuberoll
cd /
rm -r /tmp/src
