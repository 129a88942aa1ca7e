#!/bin/sh
# Before the agent, as root in the working directory: what a Dockerfile would do.
printf '1\n-2\n\n3\n' > numbers.txt
chmod +x sums.sh
