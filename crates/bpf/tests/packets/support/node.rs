//! A node of a pool: its data plane, its servers and its hold device.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use holdfast_bpf::shared_with_c::{Event, FlowKey, FlowState, FlowValue};
use holdfast_bpf::{Dataplane, SteeringVerdict};

use super::lab::Lab;
use super::server::Server;
use super::tun::Tun;

/// One node and its data plane.
pub struct Node {
    pub id: u16,
    pub name: &'static str,
    pub tun: Tun,
    pub server: Server,
    pins: PathBuf,
    plane: Mutex<Option<Dataplane>>,
    events: Arc<Mutex<Vec<Event>>>,
}

impl Node {
    pub fn new(lab: &Lab, name: &'static str, id: u16) -> Self {
        Self {
            id,
            name,
            tun: Tun::new(lab.host(name)),
            server: Server::default(),
            pins: PathBuf::from(format!("/sys/fs/bpf/{}-{name}", lab.name)),
            plane: Mutex::new(None),
            events: Arc::default(),
        }
    }

    pub fn set_plane(&self, plane: Dataplane) {
        *self.plane.lock().expect("lock") = Some(plane);
    }

    /// Returns true if the node's daemon "runs".
    pub fn runs(&self) -> bool {
        self.plane.lock().expect("lock").is_some()
    }

    /// Calls `work` with the node's data plane.
    pub fn with_dataplane<T>(&self, work: impl FnOnce(&Dataplane) -> T) -> T {
        work(self.plane.lock().expect("lock").as_ref().expect("loaded"))
    }

    /// Runs the steering program on a packet, as if the packet had arrived.
    pub fn steer(&self, packet: &[u8]) -> SteeringVerdict {
        let ethertype: [u8; 2] = if packet[0] >> 4 == 6 {
            [0x86, 0xdd]
        } else {
            [8, 0]
        };
        let frame = [&[0; 12][..], &ethertype, packet].concat();
        let mut plane = self.plane.lock().expect("lock");
        let plane = plane.as_mut().expect("loaded");
        plane.steer(&frame).expect("the program runs")
    }

    /// Simulates the daemon's death: its descriptors are closed, and pins stay.
    pub fn stop(&self) {
        drop(self.plane.lock().expect("lock").take());
    }

    /// Detaches the data plane and removes its pins.
    pub fn detach(&self) {
        if let Some(plane) = self.plane.lock().expect("lock").take() {
            plane.detach();
        }
    }

    pub fn pins(&self) -> &PathBuf {
        &self.pins
    }

    pub fn counter(&self, name: &str) -> u64 {
        let all = self.with_dataplane(Dataplane::counters);
        all.iter()
            .find(|(n, _)| *n == name)
            .unwrap_or_else(|| panic!("no counter {name}"))
            .1
    }

    pub fn flow(&self, key: &FlowKey) -> Option<FlowValue> {
        self.with_dataplane(|plane| plane.flows.get(key))
            .expect("flows")
    }

    pub fn state(&self, key: &FlowKey) -> Option<FlowState> {
        self.flow(key)
            .and_then(|value| FlowState::from_raw(value.state))
    }

    /// Sets a flow's state; other fields of an existing entry stay.
    pub fn set_state(&self, key: &FlowKey, state: FlowState, peer: u16, hold_slot: u32) {
        let old = self.flow(key).unwrap_or_default();
        let value = FlowValue {
            state: state as u8,
            peer,
            hold_slot,
            ..old
        };
        self.with_dataplane(|plane| plane.flows.set(key, &value))
            .expect("flows");
    }

    pub fn held_count(&self, slot: u32) -> u32 {
        self.with_dataplane(|plane| plane.hold_counters.get(slot))
    }

    /// Returns all events so far.
    pub fn events(&self) -> Vec<Event> {
        let events = Arc::clone(&self.events);
        self.with_dataplane(|plane| {
            let reader = plane.events(move |event| events.lock().expect("lock").push(event));
            reader.expect("events").consume();
        });
        self.events.lock().expect("lock").clone()
    }

    pub fn has_event(&self, kind: u8, flow: &FlowKey) -> bool {
        self.events()
            .iter()
            .any(|event| event.kind == kind && event.flow == *flow)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Ok(mut plane) = self.plane.lock() {
            drop(plane.take());
        }
        // The test may have removed the pins.
        let _ = std::fs::remove_dir_all(&self.pins);
    }
}

impl Node {
    /// Returns the number of flows that the node knows.
    pub fn flow_count(&self) -> usize {
        self.with_dataplane(|plane| plane.flows.entries().len())
    }
}
