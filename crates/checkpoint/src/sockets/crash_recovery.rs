//! Connections of a stopped process, taken over by a daemon that knows no more about them than the process does.

use crate::files::DescriptorCopier;
use holdfast_sys::address::{canonical, local_address, remote_address};
use holdfast_sys::sockopt::get_int;
use holdfast_sys::tcp_info::{TcpInfo, TcpState};
use holdfast_tcp_repair::{
    TcpDynamicState, TcpStaticState, abandon, activate_again, resume_without_state,
};
use libc::IPPROTO_TCP;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Resumes connections that an earlier daemon left in repair mode, in which a program can neither read nor write.
///
/// # Errors
/// Errors of procfs.
pub fn resume_all(pid: i32) -> io::Result<()> {
    for socket in connections(pid)? {
        let repaired = get_int(socket.as_fd(), IPPROTO_TCP, libc::TCP_REPAIR);
        if repaired.is_ok_and(|on| on != 0) {
            // A failure is ignored, because nothing else could be done for the connection.
            let _ = resume_without_state(socket.as_fd());
        }
    }
    Ok(())
}

/// Resumes connections that an earlier daemon restored and may not have activated; `unfinished` are the
/// connections that lack part of their state ([`Sockets::unfinished`]).
///
/// [`Sockets::unfinished`]: super::Sockets::unfinished
///
/// # Errors
/// Errors of procfs.
pub fn activate_restored(
    pid: i32,
    unfinished: &[(TcpStaticState, TcpDynamicState)],
) -> io::Result<()> {
    for socket in connections(pid)? {
        let is_this_connection = |fixed: &TcpStaticState| {
            let ends = (
                local_address(socket.as_fd()),
                remote_address(socket.as_fd()),
            );
            matches!(ends, (Ok(local), Ok(remote))
                if canonical(local) == fixed.local && canonical(remote) == fixed.remote)
        };
        if let Some((fixed, state)) = unfinished
            .iter()
            .find(|(fixed, _)| is_this_connection(fixed))
        {
            // A failure is ignored, because nothing else could be done for the connection.
            let _ = activate_again(socket, fixed, state);
        }
    }
    resume_all(pid)
}

/// Ends the connections here without sending anything, because they belong to another host.
///
/// # Errors
/// Errors of procfs.
pub fn abandon_all(pid: i32) -> io::Result<()> {
    for socket in connections(pid)? {
        // A connection that is closed already is silent too.
        let _ = abandon(socket.as_fd());
    }
    Ok(())
}

/// Returns copies of a process's TCP connections; none for a process that does not exist.
fn connections(pid: i32) -> io::Result<Vec<OwnedFd>> {
    sockets(pid, |socket| {
        TcpInfo::read(socket).is_ok_and(|info| is_connected(info.state))
    })
}

/// Returns copies of a process's sockets that new clients reach: listening TCP sockets, and UDP sockets without a peer. None for
/// a process that does not exist.
///
/// # Errors
/// Errors of procfs.
pub fn sockets_for_new_clients(pid: i32) -> io::Result<Vec<OwnedFd>> {
    sockets(pid, |socket| {
        let protocol = get_int(socket, libc::SOL_SOCKET, libc::SO_PROTOCOL);
        match protocol {
            Ok(IPPROTO_TCP) => {
                TcpInfo::read(socket).is_ok_and(|info| info.state == TcpState::Listen)
            }
            Ok(libc::IPPROTO_UDP) => remote_address(socket).is_err(),
            _ => false,
        }
    })
}

/// Returns copies of a process's sockets for which `is_wanted` returns true.
fn sockets(pid: i32, is_wanted: fn(BorrowedFd<'_>) -> bool) -> io::Result<Vec<OwnedFd>> {
    let entries = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut copier = DescriptorCopier::default();
    let mut found = Vec::new();
    for entry in entries {
        let Ok(entry) = entry else { continue };
        let is_socket = fs::read_link(entry.path())
            .is_ok_and(|link| link.to_string_lossy().starts_with("socket:"));
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let (true, Some(number)) = (is_socket, number)
            && let Ok(copy) = copier.copy((pid, number))
            && is_wanted(copy.as_fd())
        {
            found.push(copy);
        }
    }
    Ok(found)
}

fn is_connected(state: TcpState) -> bool {
    !matches!(
        state,
        TcpState::Listen | TcpState::Close | TcpState::TimeWait
    )
}
