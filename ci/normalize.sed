# Values that differ between two runs of a documented command. Tests apply this to the page and to the output before they compare
# both (sed --regexp-extended --file).

# Log lines, and progress, which a terminal shows as a live line.
/^[0-9T:.-]+Z +[A-Z]+ /d
/^[a-z0-9-]+ for 6\.1\.0-[0-9]+-amd64: /d
# Digests, whole or short.
s/sha256:[0-9a-f]+(\.\.\.)?/sha256:.../g
# The registry's port.
s/127\.0\.0\.1:[0-9]+/127.0.0.1:PORT/g
# Debian 12's newest kernels, and the version of a package of sid.
s/6\.1\.0-[0-9]+-amd64/KERNEL/g
s/mstflint:[0-9][^-]*-KERNEL/mstflint:VERSION-KERNEL/g
s/(nvidia-[a-z]+:)[0-9.]+-/\1VERSION-/g
# Sizes, times and paths of logs.
s/[0-9]+ bytes/N bytes/g
s/[0-9]{4}(-[0-9]{2}){2}T[0-9:]+Z/TIME/g
s/[^ ]+\/logs\/[^ ;]+\.log/LOG/g
# The directory of the example.
s/[^ ]+\/(hello\/acme_hello\.c)/\1/g
# Columns are as wide as their longest cell.
s/ {2,}/  /g
