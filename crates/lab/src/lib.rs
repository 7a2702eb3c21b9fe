//! A test cluster on one machine: hosts as namespaces, links with delay, rate and loss, faults.
//!
//! A lab has nodes `n1..`, clients `c1..` and one switch `sw`. Every host has its own network, PID, mount, IPC, UTS and
//! cgroup namespaces and one interface `eth0`; the other end of that interface is a port of a Linux bridge in the
//! switch's namespace. There is one bridge per segment, and the switch routes between segments. A lab creates nothing
//! in the machine's own network namespace.
//!
//! A host exists as long as its init process. Killing the processes in the control group `holdfast-lab/<lab>` therefore
//! removes everything in memory: interfaces, mounts, pinned BPF objects. The files of a lab are in
//! `/run/holdfast/lab/<lab>`.
//!
//! ```no_run
//! use holdfast_lab::{Lab, LabSpec};
//! # fn main() -> Result<(), holdfast_lab::Error> {
//! let lab = Lab::up(&LabSpec::new("example").nodes(3).clients(1))?;
//! let (address, _) = lab.address("n1")?;
//! let status = lab.command("c1")?.args(["ping", "-c1", &address.to_string()]).status();
//! assert!(status.is_ok_and(|status| status.success()));
//! # Ok(()) }
//! ```
//!
//! The processes of a lab are instances of one program in hidden roles (init of a host, entry into a host, the link
//! program). Its `main` must call [`run_hidden_role`] first; [`LabSpec::program`] describes how the lab finds it.
#![forbid(unsafe_code)]

mod address_plan;
mod bring_up;
mod cgroup;
mod enter_host_command;
mod error;
mod host_init;
mod host_isolation;
mod lab;
mod lab_spec;
mod lab_state;
mod lab_status;
pub mod link;
mod namespace;
mod network_scripts;
mod processor_limit;
mod reboot;
mod receive_packet_steering;
pub mod testing;
mod topology;

pub use address_plan::{AddressPlan, HostKind, LabHost, MacAddress, SHARED_MAC};
pub use error::{Error, Result};
pub use host_init::run_hidden_role;
pub use lab::{Lab, down, list, prune};
pub use lab_spec::{LabSpec, ServiceReach};
pub use lab_status::{HostStatus, LabStatus};
pub use topology::{Direction, DuplexLinkConfig, LinkEntry, Topology};
