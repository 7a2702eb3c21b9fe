//! A driver of the replicator with the simplest decisions: each answered handshake is shown at once.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use holdfast_bpf::replication::Replicator;
use holdfast_bpf::replication::shared_with_c::{
    Connection, ConnectionKey, LegRoles, REPLICATION_OPENED, ReplicatedService, ReplicationEvent,
};

use super::network::{Network, device};
use super::support::lab::unique_name;
use super::{Host, eventually};

/// Index of the service.
pub const SERVICE: u16 = 3;

type Work = Box<dyn FnOnce(&Replicator) + Send>;

/// A replicator in a thread of the contact host.
pub struct Driver {
    work: Sender<Work>,
    events: Arc<Mutex<Vec<ReplicationEvent>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Driver {
    /// Starts the replicator at all interfaces of the contact host.
    pub fn start(network: &Network, service: &ReplicatedService, roles: LegRoles) -> Self {
        Self::start_with(network, service, roles, true)
    }

    /// Loads the replicator for single packets: the driver attaches nothing, and shows no handshake.
    pub fn start_quiet(network: &Network, service: &ReplicatedService, roles: LegRoles) -> Self {
        Self::start_with(network, service, roles, false)
    }

    fn start_with(
        network: &Network,
        service: &ReplicatedService,
        roles: LegRoles,
        is_attached: bool,
    ) -> Self {
        let (sender, receiver) = channel::<Work>();
        let events = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let legs = service.legs.iter().filter(|leg| leg.path.ifindex != 0);
        let devices = (0..).take(legs.count() + 1).map(device);
        let interfaces: Vec<u32> = devices.map(|d| network.contact.ifindex(&d)).collect();
        let pins = PathBuf::from(format!("/sys/fs/bpf/{}", unique_name()));
        let (own_events, own_stop) = (Arc::clone(&events), Arc::clone(&stop));
        let service = *service;
        let thread = spawn_inside(&network.contact, move || {
            let mut replicator = Replicator::load(&pins).expect("load");
            replicator.set_service(SERVICE, &service).expect("service");
            replicator.set_roles(SERVICE, roles);
            for ifindex in interfaces.into_iter().filter(|_| is_attached) {
                replicator.attach_interface(ifindex).expect("attach");
            }
            serve(&replicator, &receiver, &own_events, &own_stop, is_attached);
            replicator.detach();
        });
        let driver = Self {
            work: sender,
            events,
            stop,
            thread: Some(thread),
        };
        driver.with(|_| ());
        driver
    }

    /// Runs `work` at the contact host.
    pub fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Replicator) -> T + Send + 'static,
    ) -> T {
        let (sender, receiver) = channel();
        let work: Work = Box::new(move |replicator| {
            let _ = sender.send(work(replicator));
        });
        self.work.send(work).expect("the driver runs");
        receiver.recv().expect("the driver runs")
    }

    /// Changes the roles of the service, and sends window updates in all its connections.
    pub fn promote(&self, roles: LegRoles) {
        self.with(move |replicator| {
            replicator.set_roles(SERVICE, roles);
            for (key, _) in replicator.connections.entries() {
                replicator.send_window_update(key).expect("window update");
            }
        });
    }

    pub fn counter(&self, name: &'static str) -> u64 {
        let counters = self.with(|replicator| replicator.counters());
        let found = counters.iter().find(|(other, _)| *other == name);
        found.expect("a counter").1
    }

    pub fn connections(&self) -> Vec<(ConnectionKey, Connection)> {
        self.with(|replicator| replicator.connections.entries())
    }

    pub fn events(&self) -> Vec<ReplicationEvent> {
        self.events.lock().expect("lock").clone()
    }

    /// Waits for an event of this kind, and returns the first.
    pub fn wait_for(&self, kind: u8) -> ReplicationEvent {
        let find = || self.events().into_iter().find(|event| event.kind == kind);
        eventually(&format!("event {kind}"), || find().is_some());
        find().expect("found before")
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(
    replicator: &Replicator,
    work: &Receiver<Work>,
    events: &Mutex<Vec<ReplicationEvent>>,
    stop: &AtomicBool,
    shows: bool,
) {
    let opened = Mutex::new(Vec::new());
    let reader = replicator.events(|event| {
        events.lock().expect("lock").push(event);
        if shows && event.kind == REPLICATION_OPENED {
            opened.lock().expect("lock").push(event.key);
        }
    });
    let reader = reader.expect("events");
    while !stop.load(Ordering::Relaxed) {
        reader.consume();
        for key in opened.lock().expect("lock").drain(..) {
            replicator.show_syn_ack(key).expect("show");
        }
        if let Ok(work) = work.recv_timeout(Duration::from_millis(1)) {
            work(replicator);
        }
    }
}

/// Starts a thread inside a host.
pub fn spawn_inside(host: &Host, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    host.run(|| std::thread::spawn(work))
}
