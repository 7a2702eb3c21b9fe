//! The daemon's event loop.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use holdfast_bpf::shared_with_c::Event as KernelEvent;
use holdfast_daemon::service_manager;
use holdfast_sys::read_notifier::ReadNotifier;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Engine;
use super::setup::{SetupError, system_error};
use crate::control::ControlServer;
use crate::migration::EventReceiver;
use crate::peer_channel::PeerEvents;

/// Event sources of the loop, besides those that the engine owns.
pub(super) struct EventSources {
    pub(super) peers: PeerEvents,
    pub(super) control: ControlServer,
    /// Events from the threads that move processes.
    pub(super) worker_events: EventReceiver,
}

/// Runs the loop until SIGTERM or SIGINT.
pub(super) async fn run(
    mut engine: Engine,
    mut inputs: EventSources,
    events: holdfast_bpf::EventReader<'_>,
    kernel_events: Rc<RefCell<Vec<KernelEvent>>>,
) -> Result<(), SetupError> {
    let kernel_ready = watch_descriptor(events.as_fd(), "waiting for kernel events")?;
    let hold_ready = watch_descriptor(engine.hold.as_fd(), "waiting for held packets")?;
    let mut every_second = tokio::time::interval(Duration::from_secs(1));
    every_second.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut signals = Signals::new().map_err(system_error("signals"))?;
    loop {
        let wake = engine.next_wake();
        tokio::select! {
            biased;
            event = inputs.peers.recv() => {
                engine.handle_peer_event(event);
                while let Some(event) = inputs.peers.try_recv() {
                    engine.handle_peer_event(event);
                }
            }
            Some(worker_event) = inputs.worker_events.recv() => {
                // Flows that began before a process stopped must be known before the stop is handled.
                events.consume();
                engine.handle_kernel_events(&std::mem::take(&mut *kernel_events.borrow_mut()));
                engine.handle_worker_event(worker_event);
            }
            event = engine.program_messages.recv() => engine.handle_app_event(event),
            _ = kernel_ready.readable() => events.consume(),
            _ = hold_ready.readable() => engine.read_hold(),
            request = inputs.control.recv() => engine.handle_control(request),
            () = sleep_until(wake) => engine.handle_timeout(),
            _ = every_second.tick() => {
                // A missed wake-up delays the waiting events by at most 1 s.
                events.consume();
                engine.upkeep();
            }
            Some(()) = signals.hangup.recv() => engine.reload_certificates(),
            Some(()) = signals.terminate.recv() => break,
            Some(()) = signals.interrupt.recv() => break,
            () = tokio::task::yield_now(), if engine.background_work.has_work() => engine.run_slice(),
        }
        let pending = std::mem::take(&mut *kernel_events.borrow_mut());
        if !pending.is_empty() {
            engine.handle_kernel_events(&pending);
        }
        engine.run_machines();
        // Written only after the answer is sent, so that the asking node does not wait for the table.
        engine.write_behind();
    }
    service_manager::report_stopping();
    // Filters, maps and addresses stay in place: flows continue without a daemon, and the next daemon adopts them.
    engine.peers.shutdown();
    Ok(())
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

/// Signals from the operator: stop the daemon, or reload the certificates.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}
