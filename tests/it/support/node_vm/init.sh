#!/bin/busybox sh
# Init of a test node, and its agent, which reads steps from the second serial port, runs them one by one, and writes their
# results.
# The script only uses busybox.

# pivot_root does not work on the initramfs root, but works on a bind mount of it, like on a disk.
if [ -z "$1" ]; then
    /bin/busybox mount --bind / /node
    cd /node || exit 1
    /bin/busybox mount --move . /
    exec /bin/busybox chroot . /bin/busybox sh /init reaper
fi

# The reaper is the parent of ended containers. The agent has only its steps as children, because a shell that reads a line
# while a child ends loses the start of that line.
if [ "$1" = reaper ]; then
    # Background processes read from /dev/null.
    /bin/busybox mount -t devtmpfs devtmpfs /dev
    /bin/busybox sh /init agent &
    while :; do wait; done
fi

export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /containers
# systemd shares every mount of a node, and a kubelet relies on that for mountPropagation.
mount --make-rshared /
# The runtime's own mounts stay private.
mount --make-private /containers
modprobe overlay || echo "modprobe overlay: $?"

stty raw -echo < /dev/ttyS1
exec < /dev/ttyS1 > /dev/ttyS1 2> /dev/console
read -r uptime _ < /proc/uptime
echo "ready $uptime $(uname -r)"
while read -r id limit code; do
    echo "$code" | base64 -d > /tmp/step
    timeout -s KILL "$limit" sh /tmp/step > /tmp/said 2>&1 < /dev/null
    status=$?
    read -r uptime _ < /proc/uptime
    echo "$id $status $uptime $(base64 /tmp/said | tr -d '\n')"
done
