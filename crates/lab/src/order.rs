//! Links keep the order of their packets.
//!
//! What a thread and its interrupts send over a virtual link is queued at the CPU that each runs on, so packets of one
//! connection overtake each other. Receive packet steering gives all of a connection to one CPU.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use crate::{
    error::{Context, Result},
    state::State,
};

/// The most CPUs that one word of a mask names.
const CPUS_MAX: usize = 32;

/// Steers the packets of every interface of every host, and of the switch, by connection.
pub(crate) fn keep(state: &State) -> Result<()> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let mask = format!("{:x}", u32::MAX >> (CPUS_MAX - cpus.min(CPUS_MAX)));
    for init in state.inits.values() {
        // A host's /sys, which shows its own interfaces.
        let interfaces = PathBuf::from(format!("/proc/{}/root/sys/class/net", init.pid));
        for interface in entries(&interfaces)? {
            for queue in entries(&interface.join("queues"))? {
                let file = queue.join("rps_cpus");
                if file.exists() {
                    fs::write(&file, &mask).context(|| format!("write {}", file.display()))?;
                }
            }
        }
    }
    Ok(())
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        fs::read_dir(directory)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    };
    read().context(|| format!("read {}", directory.display()))
}
