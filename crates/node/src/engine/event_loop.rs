//! The daemon's event loop.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use holdfast_bpf::shared_with_c::Event as KernelEvent;
use holdfast_sys::read_notifier::ReadNotifier;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Engine;
use super::setup::{SetupError, system_error};
use crate::control::ControlServer;
use crate::credentials::WorkerEvents;
use crate::health::ObservationReceiver;
use crate::membership::{GroupEvent, GroupEvents};
use crate::migration::EventReceiver;
use crate::peer_channel::PeerEvents;

/// Event sources of the loop that outlive an engine.
pub(super) struct EventSources {
    pub(super) peers: PeerEvents,
    pub(super) control: ControlServer,
    /// Events from the thread of certificates.
    pub(super) credential_events: WorkerEvents,
    /// Events of a group that runs itself.
    pub(super) group: Option<GroupEvents>,
    pub(super) signals: Signals,
}

/// Reason for the end of the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoopEnd {
    /// A signal stops the daemon.
    Stopped,
    /// The group has given this node another number: the engine must begin anew with it.
    Renumbered,
}

/// Runs the loop until SIGTERM or SIGINT, or until this node has another number.
pub(super) async fn run(
    mut engine: Engine,
    inputs: &mut EventSources,
    (mut worker_events, mut observations): (EventReceiver, ObservationReceiver),
    events: holdfast_bpf::EventReader<'_>,
    kernel_events: Rc<RefCell<Vec<KernelEvent>>>,
) -> Result<LoopEnd, SetupError> {
    let kernel_ready = watch_descriptor(events.as_fd(), "waiting for kernel events")?;
    let hold_ready = watch_descriptor(engine.hold.as_fd(), "waiting for held packets")?;
    let mut every_second = tokio::time::interval(Duration::from_secs(1));
    every_second.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let end = loop {
        let wake = engine.next_wake();
        tokio::select! {
            biased;
            event = inputs.peers.recv() => {
                engine.handle_peer_event(event);
                while let Some(event) = inputs.peers.try_recv() {
                    engine.handle_peer_event(event);
                }
            }
            Some(worker_event) = worker_events.recv() => {
                // Flows that began before a process stopped must be known before the stop is handled.
                events.consume();
                engine.handle_kernel_events(&std::mem::take(&mut *kernel_events.borrow_mut()));
                engine.handle_worker_event(worker_event);
            }
            event = next_group_event(&mut inputs.group) => {
                if engine.is_renumbered_by(&event) {
                    if let Some(group) = &mut inputs.group {
                        group.put_back(event);
                    }
                    break LoopEnd::Renumbered;
                }
                engine.handle_group_event(event);
            }
            event = engine.program_messages.recv() => engine.handle_app_event(event),
            _ = kernel_ready.readable() => events.consume(),
            _ = hold_ready.readable() => engine.read_hold(),
            () = engine.replication.readable() => engine.read_replication_events(),
            Some(event) = inputs.credential_events.recv() => engine.handle_credential_event(event),
            request = inputs.control.recv() => engine.handle_control(request),
            Some(scan) = engine.conductor.next_scan() => engine.handle_scan(scan),
            Some(observation) = observations.recv() => engine.handle_observation(observation),
            () = sleep_until(wake) => engine.handle_timeout(),
            _ = every_second.tick() => {
                // A missed wake-up delays the waiting events by at most 1 s.
                events.consume();
                engine.upkeep();
            }
            signal = inputs.signals.next() => match signal {
                OperatorSignal::Reload => engine.reload_certificates(),
                OperatorSignal::Stop => break LoopEnd::Stopped,
            },
            () = tokio::task::yield_now(), if engine.background_work.has_work() => engine.run_slice(),
        }
        let pending = std::mem::take(&mut *kernel_events.borrow_mut());
        if !pending.is_empty() {
            engine.handle_kernel_events(&pending);
        }
        engine.run_machines();
        // Written only after the answer is sent, so that the asking node does not wait for the table.
        engine.write_behind();
    };
    // Filters, maps and addresses stay in place: flows continue without a daemon, and the next daemon adopts them.
    Ok(end)
}

async fn next_group_event(group: &mut Option<GroupEvents>) -> GroupEvent {
    match group {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

fn watch_descriptor(descriptor: BorrowedFd<'_>, purpose: &str) -> Result<ReadNotifier, SetupError> {
    descriptor
        .try_clone_to_owned()
        .and_then(ReadNotifier::new)
        .map_err(system_error(purpose))
}

async fn sleep_until(wake: Option<Instant>) {
    match wake {
        Some(wake) => tokio::time::sleep_until(wake.into()).await,
        None => std::future::pending().await,
    }
}

/// A signal from the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OperatorSignal {
    /// Stop the daemon.
    Stop,
    /// Reload the certificates.
    Reload,
}

/// Signals from the operator: stop the daemon, or reload the certificates.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) -> OperatorSignal {
        tokio::select! {
            _ = self.terminate.recv() => OperatorSignal::Stop,
            _ = self.interrupt.recv() => OperatorSignal::Stop,
            _ = self.hangup.recv() => OperatorSignal::Reload,
        }
    }
}
