//! Post-copy: memory pages that are transferred after the process resumed on the acceptor (lazy pages).
//!
//! A thread that touches a missing page waits, by `userfaultfd(2)`, both in user mode and inside a system call. The
//! daemon reads the page faults and the changes of the address space, and places pages there as they arrive from the
//! donor.
//!
//! **Never a wrong byte.** Without a `userfaultfd`, a missing page reads as zeros. Memory loses that protection when
//! the last copy of its descriptor is closed, so the daemon holds one copy ([`LazyPages`]) and the restorer another.
//! If the daemon dies, the restorer kills the tree and holds its copies until all processes have ended. If the
//! restorer dies, the kernel kills the restorer's PID namespace, and the daemon holds its copies until that namespace
//! is empty.

mod lazy_memory;
mod lazy_pages;
mod missing_page_table;
mod userfault;
mod userfault_watchdog;

pub use lazy_pages::{LazyPages, PageFault};
pub(crate) use missing_page_table::{MissingPageRange, MissingPageTable};
pub(crate) use userfault::{
    USERFAULTFD_DEVICE, USERFAULTFD_FLAGS, USERFAULTFD_IOC_NEW, enable, open_device, register_range,
};
pub(crate) use userfault_watchdog::run_userfault_watchdog;

use super::error::{Context, Result};

/// Checks that this machine supports post-copy.
///
/// # Errors
/// The kernel's error if `userfaultfd` cannot handle missing pages.
pub fn probe() -> Result<()> {
    userfault::probe().context(|| "enabling userfaultfd for missing pages".to_owned())
}

/// Checks that this machine supports post-copy for processes without capabilities.
///
/// # Errors
/// The kernel's error if `/dev/userfaultfd` cannot be opened.
pub fn probe_device() -> Result<()> {
    open_device()
        .map(drop)
        .context(|| USERFAULTFD_DEVICE.to_owned())
}
