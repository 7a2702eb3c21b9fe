//! A process that makes system calls with another identity, and with this process's descriptors.
//!
//! The deputy is no thread: procfs lets threads of one process open each other's state, such as the memory of the
//! restorer, which the deputy must not open.

use super::UserIdentity;
use crate::files::FdStore;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair, sockopt,
};
use std::io;
use std::time::Duration;

/// Longest path, with its final NUL.
pub(super) const PAYLOAD_MAX: usize = 4096;
/// Bytes of a request's head: number, arguments, index of the argument that is the payload's address, and the payload's
/// length.
const HEADER_BYTES: usize = 8 * 8;
/// Longest duration of a call: a file system may be remote.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;
/// Index of no argument: a system call whose arguments hold no payload's address.
const NO_PAYLOAD: u64 = 6;

/// A process with the identity of a user, which opens and creates files with no more rights than the user has. Dropping the
/// value ends the process: its PID is in the tree's namespace, and the tree may need it.
#[derive(Debug)]
pub(super) struct UserIdentityDeputy {
    pid: i32,
    channel: OwnedFd,
    /// The deputy's end of the channel, kept open here because the deputy shares the table.
    _deputy_end: OwnedFd,
}

/// A system call for the deputy.
pub(super) struct DeputyCall<'a> {
    pub number: libc::c_long,
    pub arguments: [u64; 5],
    /// Bytes that are passed by address, and the index of that argument.
    pub payload: Option<(usize, &'a [u8])>,
}

impl UserIdentityDeputy {
    pub fn start(identity: &UserIdentity) -> io::Result<Self> {
        let pair = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // Both ends are moved above the tree's descriptors.
        let to_high_fd = |fd| FdStore::move_caller_fd_up(fd).map_err(io::Error::other);
        let (ours, theirs) = (to_high_fd(pair.0)?, to_high_fd(pair.1)?);
        sockopt::set_socket_timeout(&ours, sockopt::Timeout::Recv, Some(CALL_TIMEOUT))?;
        // SAFETY: plain numbers, for which zero is a value.
        let mut clone_args: libc::clone_args = unsafe { std::mem::zeroed() };
        clone_args.flags = libc::CLONE_FILES as u64;
        // SAFETY: `clone_args` has the kernel's layout. Without CLONE_VM the child has a copy of everything, and makes only
        // system calls until it ends.
        let pid = unsafe {
            libc::syscall(
                libc::SYS_clone3,
                &raw const clone_args,
                size_of_val(&clone_args),
            )
        };
        if pid == 0 {
            serve_calls(theirs.as_raw_fd(), identity);
        }
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            pid: pid as i32,
            channel: ours,
            _deputy_end: theirs,
        })
    }

    /// Makes a call and returns its result.
    pub fn call(&self, call: &DeputyCall<'_>) -> io::Result<i64> {
        let (payload_index, payload) = call.payload.unwrap_or((NO_PAYLOAD as usize, &[]));
        if payload.len() > PAYLOAD_MAX {
            return Err(io::Error::from(io::ErrorKind::InvalidFilename));
        }
        let mut request = Vec::with_capacity(HEADER_BYTES + payload.len());
        request.extend_from_slice(&call.number.to_ne_bytes());
        for argument in call.arguments {
            request.extend_from_slice(&argument.to_ne_bytes());
        }
        request.extend_from_slice(&(payload_index as u64).to_ne_bytes());
        request.extend_from_slice(&(payload.len() as u64).to_ne_bytes());
        request.extend_from_slice(payload);
        send(&self.channel, &request, SendFlags::NOSIGNAL)?;
        let mut answer = [0; 8];
        let (count, _) = recv(&self.channel, &mut answer[..], RecvFlags::empty())?;
        if count != answer.len() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        match i64::from_ne_bytes(answer) {
            error if error < 0 => Err(io::Error::from_raw_os_error(-error as i32)),
            result => Ok(result),
        }
    }
}

impl Drop for UserIdentityDeputy {
    fn drop(&mut self) {
        // SAFETY: the only pointer that is passed is null; nothing else waits for this child.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), libc::__WALL);
        }
    }
}

/// Serves requests in the child, which makes system calls and allocates nothing.
fn serve_calls(channel: i32, identity: &UserIdentity) -> ! {
    let mut request = [0u8; HEADER_BYTES + PAYLOAD_MAX];
    // SAFETY: system calls of the child alone, with pointers into its own memory that outlive them; the parent has
    // checked the arguments of the requested calls, and `_exit` ends the process.
    unsafe {
        if !assume_identity(identity) {
            libc::_exit(1);
        }
        loop {
            let count = libc::recv(channel, request.as_mut_ptr().cast(), request.len(), 0);
            if count < HEADER_BYTES as isize {
                libc::_exit(0);
            }
            let mut words = [0u64; HEADER_BYTES / 8];
            let bytes = size_of_val(&words);
            std::ptr::copy_nonoverlapping(request.as_ptr(), words.as_mut_ptr().cast(), bytes);
            let [number, mut a, mut b, mut c, mut d, mut e, at, _] = words;
            let payload = request.as_ptr().add(HEADER_BYTES).addr() as u64;
            match at {
                0 => a = payload,
                1 => b = payload,
                2 => c = payload,
                3 => d = payload,
                4 => e = payload,
                _ => {}
            }
            let mut result = libc::syscall(number as libc::c_long, a, b, c, d, e) as i64;
            if result < 0 {
                result = -i64::from(*libc::__errno_location());
            }
            let answer = (&raw const result).cast();
            libc::send(channel, answer, size_of_val(&result), libc::MSG_NOSIGNAL);
        }
    }
}

/// Changes the calling process to this identity; returns false if the kernel refuses.
///
/// # Safety
/// The process has one thread.
unsafe fn assume_identity(identity: &UserIdentity) -> bool {
    let UserIdentity {
        user,
        group,
        groups,
    } = identity;
    let header = [CAPABILITY_VERSION, 0];
    let none = [0u32; 6];
    // SAFETY: all pointers are to memory of the layout that the calls read, which outlives them.
    unsafe {
        libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) == 0
            && libc::syscall(libc::SYS_setresgid, *group, *group, *group) == 0
            && libc::syscall(libc::SYS_setresuid, *user, *user, *user) == 0
            && libc::syscall(libc::SYS_capset, header.as_ptr(), none.as_ptr()) == 0
    }
}
