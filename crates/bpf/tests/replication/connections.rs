//! Whole connections between unmodified sockets.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use holdfast_bpf::replication::monotonic_now;
use holdfast_bpf::replication::shared_with_c::{
    CONNECTION_CLOSED, LegRoles, LegState, REPLICATION_CLOSED, REPLICATION_DIVERGED,
    REPLICATION_LEG_FINISHED, REPLICATION_LEG_RESET, REPLICATION_OUTPUT_AFTER_FIN, SERVICE_COMPARE,
};
use holdfast_bpf::replication::watch::{ConnectionWatch, Observation, WatchLimits};

use super::driver::Driver;
use super::eventually;
use super::network::{Network, PORT, host_address, service_address};
use super::server::{Server, answer};

struct Setup {
    // Dropped in this order: sockets before their hosts.
    servers: Vec<Server>,
    driver: Driver,
    network: Network,
    v6: bool,
}

impl Setup {
    /// Starts a service with this number of legs, of which the first is the primary. `wrong` is a leg, and the position of its wrong
    /// answer.
    fn new(legs: u8, v6: bool, wrong: Option<(u8, u64)>) -> Self {
        let network = Network::new(legs);
        let mut service = network.service(legs, v6);
        service.flags = SERVICE_COMPARE;
        let servers = (0..legs).map(|leg| {
            let address = SocketAddr::new(host_address(leg + 1, v6), PORT);
            let wrong_at = wrong.filter(|(other, _)| *other == leg);
            let wrong_at = wrong_at.map_or(u64::MAX, |(_, position)| position);
            Server::start(network.leg(leg), address, wrong_at)
        });
        let servers = servers.collect();
        let driver = Driver::start(&network, &service, all_legs(legs));
        Self {
            servers,
            driver,
            network,
            v6,
        }
    }

    fn connect(&self) -> TcpStream {
        let address = service_address(self.v6);
        let stream = self.network.client().run(|| TcpStream::connect(address));
        let stream = stream.expect("connect");
        stream.set_nodelay(true).expect("no delay");
        let limit = Some(Duration::from_secs(60));
        stream.set_read_timeout(limit).expect("timeout");
        stream
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:#?}", self.driver.connections());
            eprintln!("{:?}", self.driver.with(|replicator| replicator.counters()));
        }
    }
}

fn all_legs(legs: u8) -> LegRoles {
    LegRoles {
        primary: 0,
        live: (1 << legs) - 1,
    }
}

/// The input of a test at a position.
fn input(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// A connection's position in both directions.
struct Exchange {
    stream: TcpStream,
    position: u64,
}

impl Exchange {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            position: 0,
        }
    }

    /// Sends this number of bytes, and checks the answers. Both directions are busy at once.
    fn run(&mut self, bytes: usize) {
        let first = self.position;
        let request: Vec<u8> = (first..).take(bytes).map(input).collect();
        let mut writer = self.stream.try_clone().expect("clone");
        let mut answers = vec![0; bytes];
        std::thread::scope(|scope| {
            let request = &request;
            scope.spawn(move || writer.write_all(request).expect("write"));
            self.stream.read_exact(&mut answers).expect("read");
        });
        let expected = (first..).zip(&request).map(|(at, byte)| answer(*byte, at));
        let wrong = expected.zip(&answers).position(|(want, got)| want != *got);
        assert_eq!(wrong, None, "first wrong byte after {first}");
        self.position += bytes as u64;
    }

    /// Ends the connection in both directions.
    fn close(mut self) {
        self.stream.shutdown(Shutdown::Write).expect("shutdown");
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest).expect("end");
        assert_eq!(rest, []);
    }
}

#[test]
fn one_leg_serves_from_syn_to_close() {
    for v6 in [false, true] {
        let setup = Setup::new(1, v6, None);
        let mut exchange = Exchange::new(setup.connect());
        for size in [1, 64, 1448, 5000, 60_000, 3_000_000] {
            exchange.run(size);
        }
        let total = exchange.position;
        exchange.close();
        setup.driver.wait_for(REPLICATION_CLOSED);
        eventually("the server has ended", || {
            setup.servers[0].input_bytes() == [total]
        });
        assert_eq!(setup.driver.counter("table_full"), 0);
    }
}

#[test]
fn replicas_have_all_input_and_equal_output() {
    for v6 in [false, true] {
        let setup = Setup::new(3, v6, None);
        let mut exchange = Exchange::new(setup.connect());
        for size in [1, 64, 1448, 5000, 60_000, 3_000_000] {
            exchange.run(size);
        }
        let total = exchange.position;
        eventually("all output is compared", || {
            let (_, connection) = setup.driver.connections()[0];
            let end = connection.isn.wrapping_add(1).wrapping_add(total as u32);
            let replicas = &connection.legs[1..3];
            // The window field is too coarse for the last bytes of an output that goes on.
            let is_compared = |leg: &LegState| {
                let missing = end.wrapping_sub(leg.compared);
                missing < 1 << leg.client_scale && leg.flags == 0
            };
            replicas.iter().all(is_compared)
        });
        exchange.close();
        setup.driver.wait_for(REPLICATION_CLOSED);
        for server in &setup.servers {
            eventually("the server has ended", || server.input_bytes() == [total]);
        }
        assert_eq!(setup.driver.counter("diverged"), 0);
        assert!(setup.driver.counter("compared") > 0);
        let (_, connection) = setup.driver.connections()[0];
        assert_ne!(connection.flags & CONNECTION_CLOSED, 0);
    }
}

#[test]
fn replica_goes_on_when_link_of_primary_is_cut() {
    for v6 in [false, true] {
        let setup = Setup::new(3, v6, None);
        let mut exchange = Exchange::new(setup.connect());
        exchange.run(200_000);
        setup.network.set_link(0, "down");
        setup.driver.promote(LegRoles {
            primary: 1,
            live: 0b110,
        });
        exchange.run(1_000_000);
        setup.network.set_link(1, "down");
        setup.driver.promote(LegRoles {
            primary: 2,
            live: 0b100,
        });
        exchange.run(1_000_000);
        let total = exchange.position;
        exchange.close();
        eventually("the last server has ended", || {
            setup.servers[2].input_bytes() == [total]
        });
    }
}

#[test]
fn replica_goes_on_in_the_middle_of_bulk() {
    let setup = Setup::new(2, false, None);
    let mut exchange = Exchange::new(setup.connect());
    std::thread::scope(|scope| {
        let bulk = scope.spawn(|| {
            exchange.run(20_000_000);
            exchange
        });
        eventually("bulk has begun", || {
            let connections = setup.driver.connections();
            connections.iter().any(|(_, c)| c.tip.position > 1_000_000)
        });
        setup.network.set_link(0, "down");
        setup.driver.promote(LegRoles {
            primary: 1,
            live: 0b10,
        });
        bulk.join().expect("bulk").close();
    });
}

#[test]
fn reset_of_primary_is_reported_and_hidden_from_client() {
    let setup = Setup::new(2, false, None);
    let mut exchange = Exchange::new(setup.connect());
    exchange.run(1000);
    setup.servers[0].reset_connections();
    let event = setup.driver.wait_for(REPLICATION_LEG_RESET);
    assert_eq!((event.leg, event.acknowledged), (0, 1000));
    setup.driver.promote(LegRoles {
        primary: 1,
        live: 0b10,
    });
    exchange.run(100_000);
    exchange.close();
}

#[test]
fn killed_primary_is_replaced_without_user_space() {
    for v6 in [false, true] {
        let setup = Setup::new(3, v6, None);
        let mut exchange = Exchange::new(setup.connect());
        exchange.run(1000);
        setup.servers[0].close_connections();
        let event = setup.driver.wait_for(REPLICATION_LEG_FINISHED);
        assert_eq!((event.leg, event.acknowledged), (0, 1000));
        exchange.run(1_000_000);
        let event = setup.driver.wait_for(REPLICATION_OUTPUT_AFTER_FIN);
        assert_eq!(event.legs, 0b1);
        assert_eq!(setup.driver.connections()[0].1.present, 0b110);
        exchange.close();
    }
}

#[test]
fn end_of_output_waits_for_all_legs() {
    let setup = Setup::new(2, false, None);
    let mut exchange = Exchange::new(setup.connect());
    exchange.run(1000);
    exchange.close();
    let finished = |leg| {
        let events = setup.driver.events();
        let mut events = events.iter().filter(|e| e.kind == REPLICATION_LEG_FINISHED);
        events.any(|event| event.leg == leg && event.acknowledged == 1000)
    };
    eventually("both ends are reported", || finished(0) && finished(1));
    assert!(setup.driver.counter("held_fins") >= 1);
}

#[test]
fn wrong_byte_is_reported_with_its_stretch() {
    let wrong_at = 50_123;
    let setup = Setup::new(3, false, Some((2, wrong_at)));
    let mut exchange = Exchange::new(setup.connect());
    exchange.run(50_000);
    assert_eq!(setup.driver.counter("diverged"), 0);
    exchange.run(1000);
    let event = setup.driver.wait_for(REPLICATION_DIVERGED);
    assert_eq!((event.leg, event.known), (2, 0b101));
    assert!((wrong_at + 1..=51_000).contains(&event.position));
    assert_ne!(event.digests[0], event.digests[2]);
    exchange.run(100_000);
    exchange.close();
    let diverged = setup.driver.events();
    let diverged = diverged.iter().filter(|e| e.kind == REPLICATION_DIVERGED);
    assert_eq!(diverged.count(), 1);
}

#[test]
fn cut_replica_holds_up_the_client_and_is_found_silent() {
    let setup = Setup::new(2, false, None);
    let mut exchange = Exchange::new(setup.connect());
    exchange.run(1000);
    setup.network.set_link(1, "down");
    // The primary answers; the client is not told that its input is safe before the replica has it.
    exchange.run(100);
    let mut watch = ConnectionWatch::new(WatchLimits {
        silence_round_trips: 3,
        silence_extra: Duration::from_millis(60),
        stall_max: Duration::from_millis(300),
        lag_bytes_max: 1 << 20,
        lag_time_max: Duration::from_millis(80),
    });
    let mut observe = || {
        let connections = setup.driver.connections();
        watch.observe(monotonic_now(), &connections, |_| all_legs(2))
    };
    eventually("the replica is silent", || {
        let is_silence = |observation: &Observation| match observation {
            Observation::LegSilent { leg, answered, .. } => (*leg, *answered) == (1, 0b1),
            _ => false,
        };
        observe().iter().any(is_silence)
    });
    let is_primary_late = |observation: &Observation| match observation {
        Observation::LegSilent { leg, .. } | Observation::LegStalled { leg, .. } => *leg == 0,
        _ => false,
    };
    let late = observe();
    assert!(!late.iter().any(is_primary_late), "{late:?}");
    setup.driver.promote(LegRoles {
        primary: 0,
        live: 0b1,
    });
    exchange.run(100_000);
    exchange.close();
}

#[test]
fn lost_packets_cost_no_byte() {
    for v6 in [false, true] {
        let setup = Setup::new(3, v6, None);
        let mut exchange = Exchange::new(setup.connect());
        exchange.run(1000);
        for number in 0..=3 {
            setup.network.lose_packets(number, 50);
        }
        exchange.run(2_000_000);
        setup.network.set_link(0, "down");
        setup.driver.promote(LegRoles {
            primary: 1,
            live: 0b110,
        });
        exchange.run(2_000_000);
        let total = exchange.position;
        exchange.close();
        for server in &setup.servers[1..] {
            eventually("the server has ended", || server.input_bytes() == [total]);
        }
        assert!(setup.network.client().snmp("Tcp", "RetransSegs") > 0);
        assert_eq!(setup.driver.counter("diverged"), 0);
    }
}
