//! Clients of a group while a fault happens: long connections, a probe at each owner, and new clients.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use holdfast_api::control::{FlowListQuery, FlowState};
use holdfast_lab::Lab;
use holdfast_testbed::cluster::Cluster;
use holdfast_testbed::connection_load::{ConnectionLoad, message_interval, open_connections};
use holdfast_testbed::latency_probe::{RoundTrip, TimeSpan, added_delay_us, ping_pong};
use holdfast_testbed::network_counters::read_host;
use holdfast_testbed::new_clients::{ClientOutcome, EndedClient, NewClientLoad, NewClientSpec};

/// Host of the long connections.
const LOAD_HOST: &str = "c1";
/// Host of the new clients, other than that of the long connections, which may have the same ports.
const NEW_CLIENT_HOST: &str = "c2";
/// New clients per second.
const NEW_CLIENTS_PER_S: u32 = 200;
/// Time after which a new client gives up: two retransmissions of its SYN fit.
const NEW_CLIENT_PATIENCE: Duration = Duration::from_millis(3_500);
/// Longest wait until every connection goes on, and until the contact node knows all owners.
const PATIENCE: Duration = Duration::from_secs(30);

/// Result of one fault for the clients.
#[derive(Clone, Debug)]
pub struct FaultSample {
    /// Longest time from the start of a new client until that client, or a later one, had its answer.
    pub accept_gap: Duration,
    /// Longest round trip of a probe during the fault, minus the median one.
    pub client_gap: Duration,
    /// Connections that were reset or refused, or that ended.
    pub resets: u64,
    /// Bytes that differed from the expected ones or never came.
    pub bytes_wrong: u64,
    /// New views of the group.
    pub views: u64,
    /// Contact node before and after the fault.
    pub contacts: [String; 2],
}

/// Clients that run while a fault happens.
pub struct ClientsDuringFault {
    load: ConnectionLoad,
    probes: Vec<JoinHandle<Result<Vec<RoundTrip>>>>,
    new_clients: NewClientLoad,
    resets_before: u64,
}

/// Results of the clients during a fault.
pub struct ClientResults {
    /// See [`FaultSample::accept_gap`].
    pub accept_gap: Duration,
    /// See [`FaultSample::client_gap`].
    pub client_gap: Duration,
    /// See [`FaultSample::resets`].
    pub resets: u64,
    /// See [`FaultSample::bytes_wrong`].
    pub bytes_wrong: u64,
}

impl ClientsDuringFault {
    /// Opens the connections. Each node of `owners` must get some, and no other node any, by the table of `contact`.
    pub fn start(
        cluster: &Cluster,
        service: SocketAddr,
        connections: usize,
        (contact, owners): (&str, &BTreeSet<String>),
    ) -> Result<ClientsDuringFault> {
        let mut streams = open_connections(cluster.lab(), LOAD_HOST, service, connections)?;
        let owner_of_port = owners_by_port(cluster, contact, &streams)?;
        let found: BTreeSet<String> = owner_of_port.values().cloned().collect();
        ensure!(found == *owners, "the connections are at {found:?}");
        let mut probe_streams = Vec::new();
        for owner in owners {
            let is_owned = |stream: &TcpStream| {
                let port = stream.local_addr().map(|address| address.port());
                port.is_ok_and(|port| owner_of_port.get(&port) == Some(owner))
            };
            let position = streams.iter().position(is_owned);
            probe_streams.push(streams.swap_remove(position.context("an owner has a connection")?));
        }
        let resets_before = count_resets(cluster.lab())?;
        let load = ConnectionLoad::start(streams, message_interval(connections))?;
        let start_probe = |stream: TcpStream| {
            let shared = load.compared.clone();
            std::thread::spawn(move || ping_pong(stream, &shared))
        };
        let probes = probe_streams.into_iter().map(start_probe).collect();
        let of_echo = NewClientSpec::of_echo(service, NEW_CLIENTS_PER_S, NEW_CLIENT_PATIENCE);
        let new_clients = NewClientLoad::start(cluster.lab(), NEW_CLIENT_HOST, of_echo)?;
        let clients = ClientsDuringFault {
            load,
            probes,
            new_clients,
            resets_before,
        };
        clients.wait_for_progress()?;
        Ok(clients)
    }

    /// Waits until every connection has had an answer to data sent after this call.
    pub fn wait_for_progress(&self) -> Result<()> {
        let connections = self.load.connections();
        let answers = || connections.iter().map(|each| each.answers_received());
        let before: Vec<u64> = answers().collect();
        let deadline = Instant::now() + PATIENCE;
        // One exchange may have been under way already, so two are needed.
        let goes_on = |(each, before): (u64, &u64)| each >= before + 2;
        loop {
            let waiting = answers().zip(&before).filter(|pair| !goes_on(*pair));
            let is_broken = connections.iter().any(|each| each.is_broken());
            // Broken connections count as ended, in the results.
            if is_broken || waiting.count() == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "connections do not go on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends the clients, and returns the results for the time of the fault.
    pub fn stop(self, lab: &Lab, span: TimeSpan) -> Result<ClientResults> {
        let new_clients = self.new_clients.stop()?;
        let ended = self.load.connections().iter();
        let ended = ended.filter(|each| each.is_broken()).count() as u64;
        let resets = count_resets(lab)? - self.resets_before;
        let compared = self.load.compared.clone();
        self.load.stop()?;
        let mut client_gap_us: f64 = 0.0;
        for probe in self.probes {
            let trips = probe.join().expect("a probe does not panic")?;
            client_gap_us = client_gap_us.max(added_delay_us(&trips, span));
        }
        let is_refused = |client: &&EndedClient| {
            let outcome = client.outcome;
            matches!(
                outcome,
                ClientOutcome::ConnectFailed(_) | ClientOutcome::ExchangeFailed(_)
            )
        };
        let refused = new_clients.iter().filter(is_refused).count() as u64;
        Ok(ClientResults {
            accept_gap: accept_gap(new_clients, span),
            client_gap: Duration::from_secs_f64(client_gap_us.max(0.0) / 1e6),
            resets: resets.max(ended) + refused,
            bytes_wrong: compared.wrong.load(Ordering::Relaxed),
        })
    }
}

/// Returns the owner of each connection, by the port of the client.
fn owners_by_port(
    cluster: &Cluster,
    contact: &str,
    streams: &[TcpStream],
) -> Result<BTreeMap<u16, String>> {
    let ports = streams
        .iter()
        .map(|stream| Ok(stream.local_addr()?.port()))
        .collect::<Result<BTreeSet<u16>>>()?;
    let control = cluster.blocking_control_client(contact)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let query = FlowListQuery::default();
        let flows = control.run(async |client| client.all_flows(&query).await)?;
        let owned = flows.flows.into_iter().filter_map(|entry| {
            let port = entry.flow.remote().port();
            match entry.state {
                FlowState::Owned { owner } if ports.contains(&port) => Some((port, owner)),
                _ => None,
            }
        });
        let owners: BTreeMap<u16, String> = owned.collect();
        if owners.len() == ports.len() {
            return Ok(owners);
        }
        ensure!(
            Instant::now() < deadline,
            "{contact} knows the owners of {} of {} connections",
            owners.len(),
            ports.len()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the number of established connections of the clients that were reset (`EstabResets` of RFC 4022).
fn count_resets(lab: &Lab) -> Result<u64> {
    let counters = read_host(lab, LOAD_HOST)?;
    let count = counters.get("Tcp.EstabResets");
    count.copied().context("read the counter EstabResets")
}

/// Returns the longest time, among clients that began in a period, from the start of a client until that client or a
/// later one had its answer.
fn accept_gap(mut clients: Vec<EndedClient>, (begin, end): TimeSpan) -> Duration {
    clients.sort_by_key(|client| client.started);
    let mut first_answer = None;
    let mut longest = Duration::ZERO;
    for client in clients.iter().rev() {
        if let ClientOutcome::Answered(after) = client.outcome {
            let answered = client.started + after;
            first_answer =
                Some(first_answer.map_or(answered, |first: Instant| first.min(answered)));
        }
        if begin <= client.started && client.started <= end {
            // A client without any answer after it ends the period itself.
            let answer = first_answer.unwrap_or(end.max(client.started));
            longest = longest.max(answer - client.started);
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accept_gap_ends_with_first_answer_of_later_client() {
        let begin = Instant::now();
        let ms = Duration::from_millis;
        let client = |started: u64, answered_after: Option<u64>| EndedClient {
            started: begin + ms(started),
            port: 1,
            without_cpu: Duration::ZERO,
            outcome: answered_after.map_or(ClientOutcome::HandshakeUnanswered, |after| {
                ClientOutcome::Answered(ms(after))
            }),
        };
        let clients = vec![
            client(0, Some(1)),
            client(5, Some(1000)),
            client(10, None),
            client(300, Some(20)),
            client(305, Some(5)),
        ];
        assert_eq!(
            accept_gap(clients.clone(), (begin, begin + ms(400))),
            ms(305)
        );
        // The gap counts for clients of the period alone.
        assert_eq!(
            accept_gap(clients, (begin + ms(250), begin + ms(400))),
            ms(10)
        );
    }
}
