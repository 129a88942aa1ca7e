#!/bin/sh
awk '$3 >= 500 { print $1 }' /work/access.log | sort -u > /work/failing.txt
