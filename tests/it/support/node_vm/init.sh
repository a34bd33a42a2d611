#!/bin/busybox sh
# Init of a test node, and its agent: reads steps from the second serial port, runs them one after the other, and writes
# what became of each. Kept to what busybox has.

# The root that the kernel unpacks an initramfs into cannot be pivoted away from; a bind mount of it can, as a disk's.
if [ -z "$1" ]; then
    /bin/busybox mount --bind / /node
    cd /node || exit 1
    /bin/busybox mount --move . /
    exec /bin/busybox chroot . /bin/busybox sh /init reaper
fi

# Containers that end are its children. The agent has none but its steps: a shell that reads a line while a child
# ends loses the beginning of that line.
if [ "$1" = reaper ]; then
    # What runs in the background reads from its null device.
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
# What systemd does with every mount of a node, and what a kubelet relies on for mountPropagation.
mount --make-rshared /
# A runtime's own mounts stay with it.
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
