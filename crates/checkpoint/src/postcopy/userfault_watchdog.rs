//! Watchdog of post-copy in the restorer: keeps the `userfaultfd` descriptors open, and kills the process tree if
//! the daemon dies while pages are missing. The daemon answers the page faults.

use crate::acceptor::{RestorerMessageKind, restorer_channel};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Holds the tree's `userfaultfd` descriptors until the daemon reports that no page is missing. If the daemon dies
/// first, kills the tree.
pub(crate) fn run_userfault_watchdog(mut channel: UnixStream, userfaults: Vec<OwnedFd>) {
    let mut buffer = Vec::new();
    let mut userfaults: Vec<Option<OwnedFd>> = userfaults.into_iter().map(Some).collect();
    loop {
        match restorer_channel::receive(&mut channel, &mut buffer) {
            Ok(Some((RestorerMessageKind::PostcopyComplete, _))) => return,
            Ok(Some((RestorerMessageKind::KeepUserfault, _))) => {
                match restorer_channel::receive_descriptors(&channel, 1) {
                    Ok(received) => userfaults.extend(received.into_iter().map(Some)),
                    Err(_) => break,
                }
            }
            Ok(Some((RestorerMessageKind::DropUserfault, number))) => {
                let number = number.try_into().map_or(u64::MAX, u64::from_le_bytes);
                drop(userfaults.get_mut(number as usize).and_then(Option::take));
            }
            Ok(Some(_)) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(None) | Err(_) => break,
        }
    }
    // SAFETY: no pointers are passed; the first process of a PID namespace reaches all processes of that namespace,
    // and no others.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    // Keep the descriptors open until this process ends, after the last process of the tree.
    std::mem::forget(userfaults);
}
