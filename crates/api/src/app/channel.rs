//! One end of a session: a Unix `SOCK_SEQPACKET` socket that carries packets with descriptors.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, recvmsg, sendmsg, socket_with, socketpair,
};

use super::{DESCRIPTORS_MAX, MESSAGE_BYTES_MAX};

/// A received message with its descriptors.
#[derive(Debug)]
pub struct ChannelMessage {
    /// One encoded message: [`decode`](super::decode) it.
    pub bytes: Vec<u8>,
    /// Closed when dropped.
    pub descriptors: Vec<OwnedFd>,
    /// True if the kernel closed further descriptors of the message, because this process has reached its limit of open
    /// files (`RLIMIT_NOFILE`).
    pub descriptors_lost: bool,
}

/// One end of a session. All its descriptors, received ones included, are closed on exec.
///
/// Calls block, unless the descriptor is set non-blocking ([`Channel::set_nonblocking`]); then they return
/// `WouldBlock`, and [`AsFd`] gives the descriptor to wait on.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

/// Buffer size for the descriptors of one message and the header; about one page, on the stack.
const ANCILLARY_BYTES: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX));

thread_local! {
    /// A thread's receive buffer, reused because most packets are far shorter than the longest.
    static RECEIVE_BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; MESSAGE_BYTES_MAX]);
}

impl Channel {
    /// Connects to the daemon's socket.
    ///
    /// # Errors
    /// Same as connect(2): `NotFound` or `ConnectionRefused` without a daemon.
    pub fn connect(path: impl AsRef<Path>) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path.as_ref())?;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        connect(&socket, &address)?;
        Ok(Self { socket })
    }

    /// Returns the two ends of a new session, for tests and for a daemon that starts its programs.
    ///
    /// # Errors
    /// Same as socketpair(2).
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok((Self { socket: one }, Self { socket: other }))
    }

    /// Makes calls return `WouldBlock` instead of waiting.
    ///
    /// # Errors
    /// Same as ioctl(2).
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.socket, nonblocking)?)
    }

    /// Sends one packet with duplicates of `descriptors`.
    ///
    /// # Errors
    /// `InvalidInput` above [`MESSAGE_BYTES_MAX`] or [`DESCRIPTORS_MAX`]; `BrokenPipe` when the other end is closed;
    /// otherwise as sendmsg(2).
    pub fn send(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        if packet.is_empty()
            || packet.len() > MESSAGE_BYTES_MAX
            || descriptors.len() > DESCRIPTORS_MAX
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "packet empty, too long, or too many descriptors",
            ));
        }
        let mut space = [MaybeUninit::uninit(); ANCILLARY_BYTES];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors))
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "too many descriptors",
            ));
        }
        rustix::io::retry_on_intr(|| {
            sendmsg(
                &self.socket,
                &[IoSlice::new(packet)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            )
        })?;
        Ok(())
    }

    /// Receives one packet, or `None` when the other end has closed.
    ///
    /// # Errors
    /// `InvalidData` for a packet longer than [`MESSAGE_BYTES_MAX`] or with more than [`DESCRIPTORS_MAX`] descriptors
    /// (the received descriptors are closed); otherwise as recvmsg(2).
    pub fn receive(&self) -> io::Result<Option<ChannelMessage>> {
        RECEIVE_BUFFER.with_borrow_mut(|bytes| self.receive_into(bytes))
    }

    fn receive_into(&self, bytes: &mut [u8]) -> io::Result<Option<ChannelMessage>> {
        let mut space = [MaybeUninit::uninit(); ANCILLARY_BYTES];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let message = rustix::io::retry_on_intr(|| {
            recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        });
        let message = match message {
            // A peer that died with unread packets of this end ends a session in the same way as a close.
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            other => other?,
        };
        let descriptors: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|item| match item {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        // The kernel truncates the list if the buffer is full or the process has no free descriptor, and does not
        // say which.
        let is_truncated = message.flags.contains(ReturnFlags::CTRUNC);
        let has_too_many = is_truncated && descriptors.len() >= DESCRIPTORS_MAX;
        if message.flags.contains(ReturnFlags::TRUNC) || has_too_many {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a packet longer than the protocol allows",
            ));
        }
        if message.bytes == 0 {
            return Ok(None);
        }
        let bytes = bytes[..message.bytes].to_vec();
        Ok(Some(ChannelMessage {
            bytes,
            descriptors,
            descriptors_lost: is_truncated,
        }))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl From<OwnedFd> for Channel {
    /// Wraps an accepted or inherited socket, which must be a connected Unix `SOCK_SEQPACKET` socket.
    fn from(socket: OwnedFd) -> Self {
        Self { socket }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn descriptors_arrive_and_work() {
        let (program, daemon) = Channel::pair().unwrap();
        let mut kept = Vec::new();
        let mut sent = Vec::new();
        for _ in 0..DESCRIPTORS_MAX {
            let (mine, theirs) = UnixStream::pair().unwrap();
            kept.push(mine);
            sent.push(theirs);
        }
        let borrowed: Vec<_> = sent.iter().map(AsFd::as_fd).collect();
        program
            .send(&vec![1; MESSAGE_BYTES_MAX], &borrowed)
            .unwrap();
        drop(sent);
        let packet = daemon.receive().unwrap().unwrap();
        assert_eq!(packet.bytes, vec![1; MESSAGE_BYTES_MAX]);
        assert_eq!(packet.descriptors.len(), DESCRIPTORS_MAX);
        for (index, (mut mine, theirs)) in kept.into_iter().zip(packet.descriptors).enumerate() {
            UnixStream::from(theirs).write_all(&[index as u8]).unwrap();
            let mut got = Vec::new();
            mine.read_to_end(&mut got).unwrap();
            assert_eq!(got, [index as u8]);
        }
    }

    #[test]
    fn packet_boundaries_and_end_are_preserved() {
        let (program, daemon) = Channel::pair().unwrap();
        program.send(&[1, 2], &[]).unwrap();
        program.send(&[3], &[]).unwrap();
        drop(program);
        assert_eq!(daemon.receive().unwrap().unwrap().bytes, [1, 2]);
        assert_eq!(daemon.receive().unwrap().unwrap().bytes, [3]);
        assert!(daemon.receive().unwrap().is_none());
        assert_eq!(
            daemon.send(&[1], &[]).unwrap_err().kind(),
            io::ErrorKind::BrokenPipe
        );
    }

    #[test]
    fn oversized_packets_are_refused() {
        let (program, daemon) = Channel::pair().unwrap();
        let many = vec![daemon.as_fd(); DESCRIPTORS_MAX + 1];
        for (bytes, descriptors) in [
            (0, &many[..0]),
            (MESSAGE_BYTES_MAX + 1, &many[..0]),
            (1, &many[..]),
        ] {
            let error = program.send(&vec![0; bytes], descriptors).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
        // A sender that breaks the rules.
        let ancillary = &mut SendAncillaryBuffer::new(&mut []);
        sendmsg(
            &program,
            &[IoSlice::new(&vec![0; MESSAGE_BYTES_MAX + 1])],
            ancillary,
            SendFlags::empty(),
        )
        .unwrap();
        assert_eq!(
            daemon.receive().unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        daemon.set_nonblocking(true).unwrap();
        assert_eq!(
            daemon.receive().unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
    }
}
