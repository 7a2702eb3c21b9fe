//! Live migration of processes: saves a process tree in rounds while it runs (pre-copy), freezes it briefly, and
//! restores it with the same IDs in another PID, mount and network namespace (paper 002, sections III-A and V-A).
//!
//! The library offers single steps. The caller decides when to take each step.

#[cfg(target_arch = "x86_64")]
pub mod acceptor;
#[cfg(target_arch = "x86_64")]
mod address_ranges;
#[cfg(target_arch = "x86_64")]
pub mod digest;
#[cfg(target_arch = "x86_64")]
pub mod donor;
#[cfg(target_arch = "x86_64")]
pub mod error;
#[cfg(target_arch = "x86_64")]
mod file_identity;
pub mod file_rights;
pub mod files;
#[cfg(target_arch = "x86_64")]
pub mod image;
#[cfg(target_arch = "x86_64")]
pub mod image_judge;
#[cfg(target_arch = "x86_64")]
pub mod inspect;
#[cfg(target_arch = "x86_64")]
pub mod postcopy;
#[cfg(target_arch = "x86_64")]
pub mod procfs;
pub mod sockets;
#[cfg(target_arch = "x86_64")]
mod system_v_memory;
#[cfg(target_arch = "x86_64")]
mod trace;
#[cfg(target_arch = "x86_64")]
pub mod vdso;

/// Name (`comm`) of the reaper: the first process of a PID namespace that a restorer made.
pub const REAPER_NAME: &str = "holdfast-reaper";

/// Checks that this machine's architecture supports process migration.
///
/// # Errors
/// `Unsupported`, with the name of the architecture, on anything but x86_64.
pub fn supported() -> std::io::Result<()> {
    if cfg!(target_arch = "x86_64") {
        return Ok(());
    }
    let arch = std::env::consts::ARCH;
    let message = format!("processes can move on x86_64 only; this machine is {arch}");
    Err(std::io::Error::new(
        std::io::ErrorKind::Unsupported,
        message,
    ))
}
