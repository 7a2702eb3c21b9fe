//! The restorer's part while memory follows.

use crate::process::acceptor::{Kind, channel};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Keeps what watches the tree's memory until the daemon says that all is there. If the daemon dies first, ends the tree.
pub(crate) fn keep(mut channel: UnixStream, userfaults: Vec<OwnedFd>) {
    let mut memory = Vec::new();
    let mut userfaults: Vec<Option<OwnedFd>> = userfaults.into_iter().map(Some).collect();
    loop {
        match channel::receive(&mut channel, &mut memory) {
            Ok(Some((Kind::Complete, _))) => return,
            Ok(Some((Kind::Keep, _))) => match channel::take_over(&channel, 1) {
                Ok(more) => userfaults.extend(more.into_iter().map(Some)),
                Err(_) => break,
            },
            Ok(Some((Kind::Drop, number))) => {
                let number = number.try_into().map_or(u64::MAX, u64::from_le_bytes);
                drop(userfaults.get_mut(number as usize).and_then(Option::take));
            }
            Ok(Some(_)) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Ok(None) | Err(_) => break,
        }
    }
    // SAFETY: no pointers are passed; as the first process of a PID namespace it reaches all of that, and nobody else.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    // What watches goes with this very process, which ends when the last of them has gone.
    std::mem::forget(userfaults);
}
