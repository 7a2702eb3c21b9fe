//! The replication programs: their loading, and the loaded ones with the reader of their events.

use std::cell::RefCell;
use std::os::fd::AsFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use holdfast_bpf::replication::Replicator;
use holdfast_bpf::replication::shared_with_c::{ConnectionKey, ReplicationEvent};
use holdfast_bpf::{Error, EventReader};
use holdfast_proto::replication::Output;
use holdfast_sys::read_notifier::ReadNotifier;
use tokio::sync::Notify;

use super::map_conversion::map_roles;

/// Programs that are being loaded by another thread: the kernel verifies them for a tenth of a second, or for seconds on a busy host.
pub(super) struct LoadingPrograms {
    begun: Instant,
    result: Rc<RefCell<Option<Result<Replicator, Error>>>>,
    done: Rc<Notify>,
}

impl LoadingPrograms {
    /// Begins to load the programs. Maps and links that an earlier daemon pinned below `pins` are adopted.
    pub fn begin(pins: &Path) -> LoadingPrograms {
        let loading = LoadingPrograms {
            begun: Instant::now(),
            result: Rc::default(),
            done: Rc::default(),
        };
        let (result, done) = (Rc::clone(&loading.result), Rc::clone(&loading.done));
        let pins = pins.to_owned();
        tokio::task::spawn_local(async move {
            let load = tokio::task::spawn_blocking(move || Replicator::load(&pins));
            let loaded = load.await;
            *result.borrow_mut() =
                Some(loaded.unwrap_or_else(|error| Err(Error::Load(error.to_string()))));
            done.notify_one();
        });
        loading
    }

    /// Waits until the programs are loaded, or the kernel has refused them.
    pub async fn done(&self) {
        self.done.notified().await;
    }

    /// Returns the programs once they are loaded, attached to the interface.
    pub fn take(&self, interface: u32) -> Option<Result<LoadedPrograms, Error>> {
        let loaded = self.result.borrow_mut().take()?;
        let attached = loaded.and_then(|replicator| LoadedPrograms::attach(replicator, interface));
        if attached.is_ok() {
            let took_ms = self.begun.elapsed().as_millis();
            tracing::info!(took_ms, "the replication programs are loaded");
        }
        Some(attached)
    }
}

/// The loaded programs.
pub(super) struct LoadedPrograms {
    pub replicator: Replicator,
    reader: EventReader<'static>,
    ready: ReadNotifier,
    events: Rc<RefCell<Vec<ReplicationEvent>>>,
}

impl LoadedPrograms {
    /// Attaches the programs to the interface, before the ownership filter.
    ///
    /// # Errors
    /// The kernel refuses.
    fn attach(mut replicator: Replicator, interface: u32) -> Result<LoadedPrograms, Error> {
        let events = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&events);
        let reader = replicator.events(move |event| sink.borrow_mut().push(event))?;
        let ready = reader
            .as_fd()
            .try_clone_to_owned()
            .and_then(ReadNotifier::new);
        let ready = ready.map_err(|error| Error::Load(error.to_string()))?;
        replicator.attach_interface(interface)?;
        Ok(LoadedPrograms {
            replicator,
            reader,
            ready,
            events,
        })
    }

    /// Waits until there are events to read.
    pub async fn readable(&self) {
        let _ = self.ready.readable().await;
    }

    /// Returns the events since the last call.
    pub fn take_events(&self) -> Vec<ReplicationEvent> {
        self.reader.consume();
        std::mem::take(&mut *self.events.borrow_mut())
    }

    /// Carries out an output that concerns the data plane alone, for the service of this index.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn carry_out(&self, index: u16, output: &Output) -> Result<(), Error> {
        let replicator = &self.replicator;
        let key = |client| ConnectionKey::new(client, index);
        match *output {
            Output::SetRoles(roles) => {
                replicator.set_roles(index, map_roles(roles.primary, roles.live));
            }
            Output::SetConnectionRoles {
                client,
                primary,
                live,
                follows_service_roles,
            } => {
                let roles = (!follows_service_roles).then(|| map_roles(primary, live));
                replicator.set_connection_roles(key(client), roles)?;
            }
            Output::SendWindowUpdate { client } => {
                replicator.send_window_update(key(client))?;
            }
            Output::SendAllWindowUpdates => self.send_all_window_updates(index)?,
            Output::ShowSynAck { client } => {
                replicator.show_syn_ack(key(client))?;
            }
            Output::ResetClient { client } => {
                replicator.reset_client(key(client))?;
            }
            // The maps have the connections of an earlier daemon of this node; others are not taken over.
            Output::Adopt(_)
            | Output::SetWatchLimits(_)
            | Output::Probe { .. }
            | Output::CheckServer { .. }
            | Output::Send { .. }
            | Output::Event(_) => {}
        }
        Ok(())
    }

    /// Sends the consequences of new roles of a service, also in handshakes that waited for a leg.
    fn send_all_window_updates(&self, index: u16) -> Result<(), Error> {
        let connections = self.replicator.connections.entries();
        let connections = connections.into_iter().map(|(key, _)| key);
        let handshakes = self.replicator.half_open.entries();
        let handshakes = handshakes.into_iter().map(|(key, _)| key);
        for key in connections.chain(handshakes) {
            if key.service == index {
                self.replicator.send_window_update(key)?;
            }
        }
        Ok(())
    }

    /// Removes a service, and forgets its connections.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn remove_service(&self, index: u16) -> Result<(), Error> {
        self.replicator.remove_service(index)?;
        for (key, _) in self.replicator.connections.entries() {
            if key.service == index {
                self.replicator.forget(key)?;
            }
        }
        for (key, _) in self.replicator.half_open.entries() {
            if key.service == index {
                self.replicator.half_open.remove(&key)?;
            }
        }
        Ok(())
    }
}
