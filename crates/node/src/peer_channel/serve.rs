//! Service of a greeted connection.

use std::cell::Cell;
use std::time::{Duration, Instant};

use holdfast_wire::Frame;
use tokio::time::{MissedTickBehavior, interval};

use super::PeerConnectionError;
use super::connection::PeerConnection;
use super::peer::{Direction, Peer};
use super::peers::PeerChannelState;

/// Time limit from the first byte to the end of the greeting.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves `link` until it ends. Returns the reason.
pub(super) async fn run(
    state: &PeerChannelState,
    peer: &Peer,
    link: &PeerConnection,
    direction: Direction,
) -> PeerConnectionError {
    if let Err(error) = link.fix_receive_buffer_size() {
        tracing::debug!(peer = %peer.name, %error, "cannot set the size of a receive buffer");
    }
    let pings = OutstandingPing::default();
    let mut watch = SilenceWatch::new(state);
    let mut ticks = interval(state.options.timing.ping_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        if let Err(reason) = receive_frames(state, peer, link, direction, &pings) {
            return reason;
        }
        if !state.events.has_room() {
            tokio::select! {
                () = state.events.wait_room() => {}
                why = link.wait_closed() => return why,
            }
        }
        // Received data is handled before a tick that would count as silence.
        let step = tokio::select! {
            biased;
            ready = link.wait_readable() => ready.and_then(|()| link.read()),
            done = link.drain() => done,
            reason = link.wait_closed() => Err(reason),
            _ = ticks.tick() => tick(link, direction, &pings, &mut watch),
        };
        if let Err(reason) = step {
            return reason;
        }
    }
}

fn receive_frames(
    state: &PeerChannelState,
    peer: &Peer,
    link: &PeerConnection,
    direction: Direction,
    pings: &OutstandingPing,
) -> Result<(), PeerConnectionError> {
    while let Some(frame) = link.pop_frame()? {
        match (direction, frame) {
            (Direction::Incoming, Frame::Ping { token }) => link.send(&Frame::Pong { token })?,
            (Direction::Outgoing, Frame::Pong { token }) => {
                if let Some(round_trip) = pings.on_pong(token) {
                    peer.record_round_trip(round_trip);
                }
            }
            (_, Frame::Membership(frame)) => {
                state.deliver_membership_frame(peer, link.certified_role(), frame)?;
            }
            (_, Frame::DatagramAuthenticationKey { boot, key }) if state.is_self_running() => {
                state.learn_datagram_key(peer, boot, key);
            }
            (Direction::Incoming, frame) if is_for_engine(&frame) => {
                peer.deliver(frame, state.options.timing.queue_bytes)?;
            }
            (_, frame) => return Err(PeerConnectionError::UnexpectedFrame(frame.name())),
        }
    }
    Ok(())
}

fn is_for_engine(frame: &Frame) -> bool {
    !matches!(
        frame,
        Frame::Hello { .. }
            | Frame::Refused { .. }
            | Frame::Ping { .. }
            | Frame::Pong { .. }
            | Frame::DatagramAuthenticationKey { .. }
    )
}

fn tick(
    link: &PeerConnection,
    direction: Direction,
    pings: &OutstandingPing,
    watch: &mut SilenceWatch,
) -> Result<(), PeerConnectionError> {
    watch.tick(link)?;
    // A ping behind a backlog would measure the backlog.
    if direction == Direction::Outgoing && link.queued_bytes() == 0 {
        link.send(&pings.next_ping())?;
    }
    Ok(())
}

/// The outstanding ping, if any.
#[derive(Default)]
struct OutstandingPing {
    token: Cell<u64>,
    sent_at: Cell<Option<Instant>>,
}

impl OutstandingPing {
    fn next_ping(&self) -> Frame {
        let token = self.token.get() + 1;
        self.token.set(token);
        self.sent_at.set(Some(Instant::now()));
        Frame::Ping { token }
    }

    fn on_pong(&self, token: u64) -> Option<Duration> {
        // An answer to an earlier ping is late, not fast.
        if token != self.token.get() {
            return None;
        }
        self.sent_at.take().map(|sent| sent.elapsed())
    }
}

/// Counts the ticks without a sign of life.
struct SilenceWatch {
    dead_after: Duration,
    silent_ticks_max: u32,
    silent_ticks: u32,
    received_bytes: u64,
    sent_bytes: u64,
}

impl SilenceWatch {
    fn new(state: &PeerChannelState) -> SilenceWatch {
        let timing = &state.options.timing;
        let ticks = timing.dead_after.as_micros() / timing.ping_interval.as_micros().max(1);
        SilenceWatch {
            dead_after: timing.dead_after,
            silent_ticks_max: u32::try_from(ticks).unwrap_or(u32::MAX).max(2),
            silent_ticks: 0,
            received_bytes: 0,
            sent_bytes: 0,
        }
    }

    fn tick(&mut self, link: &PeerConnection) -> Result<(), PeerConnectionError> {
        let received = link.received_bytes.get();
        let sent = link.sent_bytes.get();
        let has_received = std::mem::replace(&mut self.received_bytes, received) != received;
        let has_sent = std::mem::replace(&mut self.sent_bytes, sent) != sent;
        // Data that the socket accepts while frames wait is a sign of life too, because no ping is sent then.
        if has_received || has_sent && link.queued_bytes() > 0 {
            self.silent_ticks = 0;
            return Ok(());
        }
        self.silent_ticks += 1;
        match self.silent_ticks >= self.silent_ticks_max {
            true => Err(PeerConnectionError::IdleTimeout(self.dead_after)),
            false => Ok(()),
        }
    }
}
