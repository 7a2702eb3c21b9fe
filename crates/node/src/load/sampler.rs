//! The thread that measures. Reading `/proc` would delay packets on the event loop.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Instant;

use super::process_trees::children_of;
use super::server_processes::ServerProcesses;
use super::{NodeLoadMeter, NodeMeasurement};

/// Processes to measure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MeasurementRequest {
    /// PIDs of processes that are measured with their descendants.
    pub roots: BTreeSet<i32>,
    /// PIDs of processes without threads whose children are measured with their descendants.
    pub parents: BTreeSet<i32>,
    /// TCP services, whose servers on this host are measured too.
    pub services: Vec<SocketAddr>,
}

/// A measurement with the servers that were found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewestMeasurement {
    /// Loads of the node and of the measured process trees.
    pub node: NodeMeasurement,
    /// Processes that listen at addresses of services: PIDs, each with the services.
    pub servers: BTreeMap<i32, BTreeSet<SocketAddr>>,
}

/// Thread that measures loads; ends when this value is dropped.
#[derive(Debug)]
pub struct LoadSampler {
    requests: SyncSender<MeasurementRequest>,
    results: Receiver<NewestMeasurement>,
}

impl LoadSampler {
    /// Starts the thread in this network namespace.
    ///
    /// # Errors
    /// There is no memory for a thread, or no descriptor for its netlink socket.
    pub fn start(interface: &str) -> io::Result<LoadSampler> {
        let servers = ServerProcesses::new()?;
        let meter = NodeLoadMeter::new(interface);
        let (requests, request_receiver) = sync_channel(1);
        let (result_sender, results) = channel();
        std::thread::Builder::new()
            .name("load-meter".to_owned())
            .spawn(move || run(meter, servers, &request_receiver, &result_sender))?;
        Ok(LoadSampler { requests, results })
    }

    /// Requests a measurement. While one waits already, the request is dropped.
    pub fn request(&self, request: MeasurementRequest) {
        let _ = self.requests.try_send(request);
    }

    /// Returns the newest measurement since the last call, if there is one.
    pub fn take_newest(&self) -> Option<NewestMeasurement> {
        self.results.try_iter().last()
    }
}

fn run(
    mut meter: NodeLoadMeter,
    mut finder: ServerProcesses,
    requests: &Receiver<MeasurementRequest>,
    results: &Sender<NewestMeasurement>,
) {
    let started = Instant::now();
    while let Ok(request) = requests.recv() {
        let servers = finder.find(&request.services);
        let mut roots = request.roots;
        roots.extend(servers.keys());
        roots.extend(
            request
                .parents
                .iter()
                .flat_map(|parent| children_of(*parent)),
        );
        let roots: Vec<i32> = roots.into_iter().collect();
        let Some(node) = meter.measure(started.elapsed(), &roots) else {
            continue;
        };
        if results.send(NewestMeasurement { node, servers }).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn thread_measures_servers_and_roots() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let service = listener.local_addr().expect("an address");
        let own = i32::try_from(std::process::id()).expect("a PID");
        let sampler = LoadSampler::start("lo").expect("a thread");
        let request = MeasurementRequest {
            roots: BTreeSet::from([1]),
            parents: BTreeSet::new(),
            services: vec![service],
        };
        let started = Instant::now();
        // The search for servers takes turns, so that several measurements pass before this process is found.
        let found = loop {
            sampler.request(request.clone());
            match sampler.take_newest() {
                Some(newest) if newest.node.trees.contains_key(&own) => break newest,
                _ if started.elapsed() > Duration::from_secs(60) => {
                    panic!("exceeded time: this process is found");
                }
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        assert!(found.node.trees.contains_key(&1), "{found:?}");
        assert_eq!(found.servers.get(&own), Some(&BTreeSet::from([service])));
    }
}
