//! Memory that follows a process which runs already (post-copy).
//!
//! Who touches a page that is not there waits, by `userfaultfd(2)`: in the program, or in the kernel on its behalf. The daemon
//! reads who waits and what becomes of the memory meanwhile, and puts pages there as they come from the donor.
//!
//! **Never a wrong byte.** Where nothing watches memory any more, a page that is missing is a page of zeros. That comes when the
//! last copy of a `userfaultfd` is closed, so the daemon has one ([`Following`]) and the restorer another. If the daemon
//! dies, the restorer kills the tree and holds its copies until all of it has gone. If the restorer dies, the kernel kills its PID
//! namespace, and the daemon holds its copies until that is empty.

mod keeper;
mod serving;
mod space;
mod table;
mod userfault;

pub(crate) use keeper::keep;
pub use serving::{Following, Want};
pub(crate) use table::{Place, Table};
pub(crate) use userfault::{DEVICE, NEW, OPEN, open_device, register, start};

use super::error::{Context, Result};

/// Whether memory can follow processes to this machine.
///
/// # Errors
/// What the kernel says.
pub fn probe() -> Result<()> {
    userfault::probe().context(|| "userfaultfd for missing pages".to_owned())
}

/// Whether that can be for processes without capabilities too.
///
/// # Errors
/// What the kernel says.
pub fn probe_device() -> Result<()> {
    open_device().map(drop).context(|| DEVICE.to_owned())
}
