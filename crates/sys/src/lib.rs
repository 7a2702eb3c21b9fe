//! Interface to the kernel: socket options and diagnostics, descriptors between processes, TUN devices, addresses,
//! neighbours, sysctls, control groups and capabilities. The crate executes; protocol decisions are made elsewhere.
//!
//! All functions work in the network namespace of the calling thread and need Linux 6.12 or newer. Functions that
//! change a socket need `CAP_NET_ADMIN` in the socket's namespace (see [`caps`]).

pub mod address;
pub mod caps;
pub mod cgroup;
pub mod fd_passing;
pub mod local_delivery_routes;
pub mod neighbour_announcement;
pub mod net;
pub mod netlink;
pub mod packet;
pub mod priority;
pub mod read_notifier;
pub mod sock_diag;
pub mod socket_filter;
pub mod sockopt;
pub mod source_routes;
pub mod syscall_confinement;
pub mod sysctl;
pub mod tcp_info;
pub mod tun;
