//! Capabilities (`capabilities(7)`): finds missing ones, and drops unneeded ones.

use crate::sockopt::check;
use std::fmt;
use std::io;

/// A capability Holdfast may need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Capability {
    /// Give files to their owners.
    Chown = 0,
    /// Open any file for writing (process migration).
    DacOverride = 1,
    /// Read other processes' files (process migration).
    DacReadSearch = 2,
    /// Act for the owner of a file.
    Fowner = 3,
    /// Signal other users' processes.
    Kill = 5,
    /// Become a member of any group.
    Setgid = 6,
    /// Become any user.
    Setuid = 7,
    /// Drop capabilities from the bounding set, and set the capabilities of restored processes.
    Setpcap = 8,
    /// Bind ports below 1024.
    NetBindService = 10,
    /// Repair mode, routes, addresses, TUN, tc.
    NetAdmin = 12,
    /// Raw sockets, `SO_BINDTODEVICE`.
    NetRaw = 13,
    /// Read and control other processes (`pidfd_getfd`, ptrace).
    SysPtrace = 19,
    /// Namespaces, mounts.
    SysAdmin = 21,
    /// Raise priorities.
    SysNice = 23,
    /// Raise limits.
    SysResource = 24,
    /// Let networking BPF programs read kernel memory.
    Perfmon = 38,
    /// Load BPF programs, make maps.
    Bpf = 39,
    /// Choose PIDs of restored processes.
    CheckpointRestore = 40,
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Chown => "CAP_CHOWN",
            Self::DacOverride => "CAP_DAC_OVERRIDE",
            Self::DacReadSearch => "CAP_DAC_READ_SEARCH",
            Self::Fowner => "CAP_FOWNER",
            Self::Kill => "CAP_KILL",
            Self::Setgid => "CAP_SETGID",
            Self::Setuid => "CAP_SETUID",
            Self::Setpcap => "CAP_SETPCAP",
            Self::NetBindService => "CAP_NET_BIND_SERVICE",
            Self::NetAdmin => "CAP_NET_ADMIN",
            Self::NetRaw => "CAP_NET_RAW",
            Self::SysPtrace => "CAP_SYS_PTRACE",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysNice => "CAP_SYS_NICE",
            Self::SysResource => "CAP_SYS_RESOURCE",
            Self::Perfmon => "CAP_PERFMON",
            Self::Bpf => "CAP_BPF",
            Self::CheckpointRestore => "CAP_CHECKPOINT_RESTORE",
        })
    }
}

/// `_LINUX_CAPABILITY_VERSION_3`: 64-bit sets in two halves.
const VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapWords {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Returns the capabilities in `needed` that the calling thread lacks in its effective set.
///
/// # Errors
/// Errors of `capget(2)`.
pub fn missing_capabilities(needed: &[Capability]) -> io::Result<Vec<Capability>> {
    let (effective, _) = capability_sets()?;
    let lacks = |one: &&Capability| effective & bit(**one) == 0;
    Ok(needed.iter().filter(lacks).copied().collect())
}

/// Drops every capability but `keep` from the bounding, permitted, effective, inheritable and ambient sets of the
/// calling thread. Threads started later inherit these sets; threads that already run keep their own, so call this
/// function first.
///
/// # Errors
/// Errors of `prctl(2)` and `capset(2)`. The bounding set is left as it is without `CAP_SETPCAP`, which dropping from
/// the set needs; such a process cannot gain capabilities by running an ordinary program anyway.
pub fn keep_only_capabilities(keep: &[Capability]) -> io::Result<()> {
    if capability_sets()?.0 & bit(Capability::Setpcap) != 0 {
        drop_bounding(mask_of(keep))?;
    }
    keep_only_except_bounding(keep)
}

/// Does the same as [`keep_only_capabilities`], but leaves the bounding set: for a thread that starts programs with more
/// capabilities.
///
/// # Errors
/// Errors of `prctl(2)` and `capset(2)`.
pub fn keep_only_except_bounding(keep: &[Capability]) -> io::Result<()> {
    let wanted = mask_of(keep);
    let (_, permitted) = capability_sets()?;
    // SAFETY: no pointers are passed.
    check(unsafe {
        libc::prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_CLEAR_ALL,
            0,
            0,
            0,
        )
    })?;
    let kept = wanted & permitted;
    let halves = [kept as u32, (kept >> 32) as u32].map(|set| CapWords {
        effective: set,
        permitted: set,
        inheritable: 0,
    });
    let header = CapHeader {
        version: VERSION,
        pid: 0,
    };
    // SAFETY: header and the two halves have the layout of version 3 and outlive the call.
    let outcome = unsafe { libc::syscall(libc::SYS_capset, &raw const header, halves.as_ptr()) };
    check(outcome as libc::c_int)
}

fn drop_bounding(wanted: u64) -> io::Result<()> {
    for number in 0..64u64 {
        // SAFETY: no pointers are passed.
        let present = unsafe { libc::prctl(libc::PR_CAPBSET_READ, number, 0, 0, 0) };
        if present == 1 && wanted & (1 << number) == 0 {
            // SAFETY: no pointers are passed.
            check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) })?;
        }
    }
    Ok(())
}

/// Returns the effective and permitted sets of the calling thread.
fn capability_sets() -> io::Result<(u64, u64)> {
    let mut header = CapHeader {
        version: VERSION,
        pid: 0,
    };
    let mut halves = [CapWords::default(); 2];
    // SAFETY: header and the two halves have the layout of version 3, are writable and outlive the call.
    let outcome = unsafe { libc::syscall(libc::SYS_capget, &raw mut header, halves.as_mut_ptr()) };
    check(outcome as libc::c_int)?;
    let join = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    let [low, high] = halves;
    Ok((
        join(low.effective, high.effective),
        join(low.permitted, high.permitted),
    ))
}

fn mask_of(capabilities: &[Capability]) -> u64 {
    capabilities.iter().fold(0, |set, one| set | bit(*one))
}

fn bit(capability: Capability) -> u64 {
    1 << capability as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_capabilities_are_dropped() {
        // Runs on its own thread, because other tests need their capabilities.
        let outcome = std::thread::spawn(|| {
            let both = [Capability::NetAdmin, Capability::NetRaw];
            assert_eq!(missing_capabilities(&both).expect("readable"), []);
            keep_only_capabilities(&[Capability::NetAdmin]).expect("dropped");
            assert_eq!(
                missing_capabilities(&both).expect("readable"),
                [Capability::NetRaw]
            );
            let status = std::fs::read_to_string("/proc/thread-self/status").expect("status");
            for set in ["CapPrm", "CapEff", "CapBnd"] {
                let line = status
                    .lines()
                    .find(|line| line.starts_with(set))
                    .expect("a set");
                assert!(line.ends_with("0000000000001000"), "{line}");
            }
            keep_only_capabilities(&both).expect("no gain, no error");
            assert_eq!(
                missing_capabilities(&both).expect("readable"),
                [Capability::NetRaw]
            );
        });
        outcome.join().expect("a thread");
    }
}
