#!/bin/sh
for name in $*; do
    echo "Hello, $name!"
done
