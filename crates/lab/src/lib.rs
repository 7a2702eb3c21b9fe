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
//! use holdfast_lab::{Lab, Spec};
//! # fn main() -> Result<(), holdfast_lab::Error> {
//! let lab = Lab::up(&Spec::new("example").nodes(3).clients(1))?;
//! let (address, _) = lab.address("n1")?;
//! let status = lab.command("c1")?.args(["ping", "-c1", &address.to_string()]).status();
//! assert!(status.is_ok_and(|status| status.success()));
//! # Ok(()) }
//! ```
//!
//! The processes of a lab are instances of one program in hidden roles (init of a host, entry into a host, the link
//! program). Its `main` must call [`init_main`] first; [`Spec::program`] describes how the lab finds it.
#![forbid(unsafe_code)]

mod bring_up;
mod cgroup;
mod enter;
mod error;
mod faults;
mod init;
mod lab;
pub mod link;
mod namespace;
mod packet_steering;
mod plan;
mod spec;
mod state;
mod status;
mod topology;
mod wiring;

pub use error::{Error, Result};
pub use init::init_main;
pub use lab::{Lab, down, list, prune};
pub use plan::{Host, HostKind, MacAddress, Plan, SHARED_MAC};
pub use spec::{Reach, Spec};
pub use status::{HostStatus, Status};
pub use topology::{Direction, Duplex, LinkEntry, Topology};
