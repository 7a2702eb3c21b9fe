//! A user: generates requests at random times and sends them to elements, one at a time.

use std::path::PathBuf;
use std::sync::mpsc::Sender;

use anyhow::{Result, bail};
use holdfast_api::pool::{PoolSession, SessionEvent, SessionOptions};
use holdfast_sim::Time;
use holdfast_sim::pools::RequestGenerator;

use super::clock::{VirtualClock, raise_priority};
use super::element::{ACCEPTED, COMPLETED};

/// Parameters of a user.
#[derive(Clone, Debug)]
pub(super) struct UserPlan {
    /// Socket of the pool daemon on the user's host.
    pub(super) socket: PathBuf,
    pub(super) handle: String,
    /// Index of the pool.
    pub(super) pool: usize,
    pub(super) requests: RequestGenerator,
    /// End of the requests.
    pub(super) end: Time,
}

/// A completed request of a pool user, with its times.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompletedRequest {
    pub(super) pool: usize,
    pub(super) generated: Time,
    pub(super) dequeued: Time,
    pub(super) accepted: Time,
    pub(super) ended: Time,
    /// Elements that the request was sent to.
    pub(super) attempts: u32,
}

/// Makes requests until the plan's end, and reports each one.
///
/// # Errors
/// The pool daemon has ended, or found no element for too long.
pub(super) fn run(
    plan: &UserPlan,
    clock: VirtualClock,
    done: &Sender<CompletedRequest>,
) -> Result<()> {
    raise_priority();
    let mut requests = plan.requests.clone();
    let mut generated = Time::ZERO;
    loop {
        let (interval, size) = requests.draw();
        generated = generated + interval;
        if generated >= plan.end {
            return Ok(());
        }
        // If the request before ended early, the user waits for the next one's time; otherwise the request has waited.
        std::thread::sleep(clock.wall_time_until(generated));
        let one = run_request(plan, clock, generated, size)?;
        // The receiver has ended: the run is over.
        if done.send(one).is_err() {
            return Ok(());
        }
    }
}

fn run_request(
    plan: &UserPlan,
    clock: VirtualClock,
    generated: Time,
    size: f64,
) -> Result<CompletedRequest> {
    let dequeued = clock.now();
    let options = SessionOptions {
        ask_registrar: true,
        ..SessionOptions::default()
    };
    let session = PoolSession::open_with(&plan.socket, &plan.handle, options)?;
    let (mut accepted, mut attempts) = (None, 0);
    loop {
        match session.next_event()? {
            Some(SessionEvent::Up { connection, .. }) => {
                attempts += 1;
                session.send(connection, &size.to_be_bytes())?;
            }
            Some(SessionEvent::Data { bytes }) => match bytes.as_slice() {
                [ACCEPTED] => {
                    accepted.get_or_insert_with(|| clock.now());
                }
                [COMPLETED] => break,
                other => bail!("an element sent an unknown message: {other:?}"),
            },
            Some(SessionEvent::ElementLost { .. }) => {}
            Some(SessionEvent::Failed { reason }) => bail!("{}: {reason}", plan.handle),
            Some(SessionEvent::Finished) | None => bail!("{}: the session ended", plan.handle),
        }
    }
    let ended = clock.now();
    Ok(CompletedRequest {
        pool: plan.pool,
        generated,
        dequeued,
        accepted: accepted.unwrap_or(ended),
        ended,
        attempts,
    })
}
