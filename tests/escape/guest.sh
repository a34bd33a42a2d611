# Prepares the virtual machine for the attacks: a disk with ext4, because tmpfs on Debian 12's kernel does not support
# idmapped mounts, and a delegated control group for each user.
set -e
kit=/images/kit
for module in crc32c_generic loop ext4; do modprobe $module; done
cp -a $kit/libraries/. /
truncate -s 3G /disk
/sbin/mke2fs -q -t ext4 -N 400000 /disk
mkdir -p /work
mount -o loop /disk /work
mkdir -p /work/kit
cp $kit/programs/* /work/kit/
chmod 755 /work /work/kit
mount -t cgroup2 cgroup2 /sys/fs/cgroup
for controller in memory pids; do echo +$controller > /sys/fs/cgroup/cgroup.subtree_control; done
for user in 0 48123; do
    mkdir -p /work/$user/home /sys/fs/cgroup/$user
    chown -R $user:$user /work/$user
    chown $user:$user /sys/fs/cgroup/$user /sys/fs/cgroup/$user/cgroup.*
    /work/kit/attack delegate /sys/fs/cgroup/$user
done
