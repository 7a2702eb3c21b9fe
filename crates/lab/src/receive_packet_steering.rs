//! Order of packets on links.
//!
//! Packets that a thread and its interrupts send over a virtual link are queued at the CPU on which each runs, so
//! packets of one connection could overtake each other. Receive packet steering directs all packets of a connection to
//! one CPU.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use crate::{
    error::{ErrorContext, Result},
    lab_state::LabState,
};

/// Number of CPUs in one word of a mask.
const CPUS_MAX: usize = 32;

/// Enables steering by connection on every interface of every host, and of the switch.
pub(crate) fn enable_receive_packet_steering(state: &LabState) -> Result<()> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let mask = format!("{:x}", u32::MAX >> (CPUS_MAX - cpus.min(CPUS_MAX)));
    for init in state.inits.values() {
        // Use the host's /sys, which shows its own interfaces.
        let interfaces = PathBuf::from(format!("/proc/{}/root/sys/class/net", init.pid));
        for interface in directory_entries(&interfaces)? {
            for queue in directory_entries(&interface.join("queues"))? {
                let file = queue.join("rps_cpus");
                if file.exists() {
                    fs::write(&file, &mask).context(|| format!("write {}", file.display()))?;
                }
            }
        }
    }
    Ok(())
}

fn directory_entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        fs::read_dir(directory)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    };
    read().context(|| format!("read {}", directory.display()))
}
