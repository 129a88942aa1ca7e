#!/bin/sh
# Print the sum of the numbers in a file, one on each line.
total=0
while read -r number; do
    case $number in
    [0-9]*) total=$((total + number)) ;;
    -*) ;;
    *) echo "no number: $number" >&2; exit 1 ;;
    esac
done < "$1"
echo "$total"
