#!/bin/sh
umask 077
cd /work || exit 1
script=""
while IFS="=" read -r name value; do
    # What is special on the right side of sed's command.
    value=$(printf %s "$value" | sed 's/[&/\\]/\\&/g')
    script="$script
s/@$name@/$value/g"
done < values.env
sed "$script" service.template > service.conf
