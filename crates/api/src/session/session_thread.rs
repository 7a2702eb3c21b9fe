//! The session's thread: connects, sends, receives, and reconnects.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::shared::SessionShared;
use crate::app::{Channel, FromDaemon, decode, encode};

/// The delays between attempts to reach the daemon: the delay doubles from the first to the last.
const RETRY_DELAY_MIN: Duration = Duration::from_millis(5);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);

/// Starts the thread. `channel` is the first connection, if there is one.
///
/// # Panics
/// When the process cannot start a thread.
pub(super) fn start(shared: Arc<SessionShared>, path: PathBuf, channel: Option<Channel>) {
    thread::Builder::new()
        .name("holdfast".into())
        .spawn(move || run(&shared, &path, channel))
        .expect("cannot start the session's thread");
}

fn run(shared: &SessionShared, path: &Path, mut channel: Option<Channel>) {
    let mut delay = RETRY_DELAY_MIN;
    while !shared.is_stopping() {
        match channel.take().map_or_else(|| Channel::connect(path), Ok) {
            Ok(channel) => {
                let Err(error) = run_connection(shared, &channel) else {
                    return;
                };
                if shared.core().is_open() {
                    delay = RETRY_DELAY_MIN;
                }
                shared.core().handle_disconnected();
                shared.set_first_failure(&error);
                tracing::warn!(%error, "the session with the daemon broke; connecting again");
            }
            Err(error) => {
                tracing::debug!(%error, path = %path.display(), "cannot connect to the daemon")
            }
        }
        wait_before_retry(shared, delay);
        delay = (delay * 2).min(RETRY_DELAY_MAX);
    }
}

/// Waits for `delay` or until the session stops.
fn wait_before_retry(shared: &SessionShared, delay: Duration) {
    let deadline = Instant::now() + delay;
    while !shared.is_stopping() {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return;
        }
        let timeout = Timespec {
            tv_sec: remaining.as_secs() as i64,
            tv_nsec: i64::from(remaining.subsec_nanos()),
        };
        let _ = poll(
            &mut [PollFd::new(&shared.notifier, PollFlags::IN)],
            Some(&timeout),
        );
        shared.reset_wakeup();
    }
}

/// Runs one connection. Returns when the session ends; an error when the connection broke.
fn run_connection(shared: &SessionShared, channel: &Channel) -> io::Result<()> {
    channel.set_nonblocking(true)?;
    shared.core().handle_connected();
    loop {
        if shared.is_stopping() {
            // Send the last messages of closed handles, as far as they fit: the daemon sees the session's end in any
            // case.
            return transmit(shared, channel).map(|_| ());
        }
        shared.reset_wakeup();
        let all_sent = transmit(shared, channel)?;
        let events_wanted = if all_sent {
            PollFlags::IN
        } else {
            PollFlags::IN | PollFlags::OUT
        };
        let mut polled = [
            PollFd::new(channel, events_wanted),
            PollFd::new(&shared.notifier, PollFlags::IN),
        ];
        match poll(&mut polled, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        if !(polled[0].revents() - PollFlags::OUT).is_empty() {
            receive(shared, channel)?;
        }
    }
}

/// Sends until all is sent (returns true) or the socket is full.
fn transmit(shared: &SessionShared, channel: &Channel) -> io::Result<bool> {
    loop {
        // Use a separate statement, so that the lock is not held while sending.
        let next = shared.core().poll_transmit();
        let Some(next) = next else { return Ok(true) };
        let bytes = match encode(&next.message) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::error!(%error, "cannot encode a message");
                continue;
            }
        };
        let descriptors: Vec<_> = next
            .descriptors
            .iter()
            .map(|descriptor| descriptor.as_fd())
            .collect();
        match channel.send(&bytes, &descriptors) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                shared.core().put_back(next);
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
    }
}

fn receive(shared: &SessionShared, channel: &Channel) -> io::Result<()> {
    loop {
        let packet = match channel.receive() {
            Ok(Some(packet)) => packet,
            Ok(None) => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "the daemon closed the session",
                ));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        let message: FromDaemon =
            decode(&packet.bytes).map_err(|error| invalid(error.to_string()))?;
        shared
            .core()
            .handle_message(message, packet.descriptors, packet.descriptors_lost)
            .map_err(|error| invalid(error.to_string()))?;
        loop {
            let event = shared.core().poll_event();
            let Some(event) = event else { break };
            shared.dispatch(event);
        }
    }
}
