# Traffic classes of dualpath: Ethernet, Linux tc
# Apply: as root, at both ends of each link: it shapes what an interface sends. Run with sh.
# Tested: on veth pairs between network namespaces. NOT with a physical NIC.
#
# class      urgency  DSCP  priority  SO_PRIORITY  SL  VL  lossless
# control    high       24         3            6   0   0  yes
# execution  high       46         5            6   1   1  yes
# kv         low         8         1            2   2   2  yes
# dispatch   high       34         4            6   3   3  yes
# storage    low        10         1            2   4   2  yes

# cnic: the compute network, two classes in 3200mbit
# Replace what is there first: tc qdisc del dev cnic root
# The rate is that of the link or just below: where packets queue must be here, not in the NIC.
# rate is what a class gets when both are busy, ceil what it may take of what is idle, and
# prio decides who takes first. High DSCPs go to 1:10; KV and all else to 1:20.
tc qdisc add dev cnic root handle 1: htb default 20
tc class add dev cnic parent 1: classid 1:1 htb rate 3200mbit burst 256k cburst 256k quantum 60000
tc class add dev cnic parent 1:1 classid 1:10 htb rate 3168mbit ceil 3200mbit prio 0 burst 256k cburst 256k quantum 198000
tc class add dev cnic parent 1:1 classid 1:20 htb rate 32mbit ceil 3200mbit prio 1 burst 64k cburst 256k quantum 2000
tc filter add dev cnic parent 1: protocol ip prio 1 u32 match ip dsfield 0xb8 0xfc flowid 1:10
tc filter add dev cnic parent 1: protocol ip prio 1 u32 match ip dsfield 0x60 0xfc flowid 1:10
tc filter add dev cnic parent 1: protocol ip prio 1 u32 match ip dsfield 0x88 0xfc flowid 1:10
tc filter add dev cnic parent 1: protocol ipv6 prio 2 u32 match ip6 priority 0xb8 0xfc flowid 1:10
tc filter add dev cnic parent 1: protocol ipv6 prio 2 u32 match ip6 priority 0x60 0xfc flowid 1:10
tc filter add dev cnic parent 1: protocol ipv6 prio 2 u32 match ip6 priority 0x88 0xfc flowid 1:10

# snic: the storage network, held at 400mbit
# Replace what is there first: tc qdisc del dev snic root
# The queue is long enough that bursts of one reader are not dropped from its tail.
tc qdisc add dev snic root handle 1: htb default 1
tc class add dev snic parent 1: classid 1:1 htb rate 400mbit burst 512k cburst 512k quantum 60000
tc qdisc add dev snic parent 1:1 bfifo limit 4m

# What a socket sets to be in a class (in programs)
# The filters look at the DSCP. SO_PRIORITY is for interfaces with Linux's default queue instead.
#   control: IP_TOS 96 (IPv6: IPV6_TCLASS), SO_PRIORITY 6
#   execution: IP_TOS 184 (IPv6: IPV6_TCLASS), SO_PRIORITY 6
#   kv: IP_TOS 32 (IPv6: IPV6_TCLASS), SO_PRIORITY 2
#   dispatch: IP_TOS 136 (IPv6: IPV6_TCLASS), SO_PRIORITY 6
#   storage: IP_TOS 40 (IPv6: IPV6_TCLASS), SO_PRIORITY 2
