#!/bin/sh
cat > /work/greet.sh << 'END'
#!/bin/sh
[ $# -gt 0 ] || set -- nobody
for name in "$@"; do
    echo "Hello, $name!"
done
END
