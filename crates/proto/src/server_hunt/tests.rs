//! Tests of the server hunt, rule by rule.

use super::*;
use holdfast_wire::rserpool::{SctpTransport, TransportUse};
use std::net::{IpAddr, Ipv4Addr};

const START: Duration = Duration::from_secs(100);

fn server(port: u16) -> Transport {
    Transport::Sctp(SctpTransport {
        port,
        usage: TransportUse::DataOnly,
        addresses: [IpAddr::V4(Ipv4Addr::LOCALHOST)].into_iter().collect(),
    })
}

fn hunt(servers: u16) -> ServerHunt<()> {
    let config = ServerHuntConfig::new((1..=servers).map(server).collect());
    ServerHunt::new(config, [1; 32], RegistrarTransports::Sctp)
}

/// Returns the links that the hunt makes and closes.
fn outputs(hunt: &mut ServerHunt<()>) -> (Vec<(LinkId, Transport)>, Vec<LinkId>) {
    let (mut connects, mut closes) = (Vec::new(), Vec::new());
    for output in hunt.outputs.drain(..) {
        match output {
            Output::Connect { link, to } => connects.push((link, to)),
            Output::Close { link } => closes.push(link),
            other => panic!("{other:?}"),
        }
    }
    (connects, closes)
}

#[test]
fn at_most_three_attempts_run_and_first_success_becomes_home() {
    let mut hunt = hunt(5);
    hunt.config.parallel = 9;
    hunt.start(START);
    let (tried, _) = outputs(&mut hunt);
    assert_eq!(tried.len(), 3);
    assert_eq!(hunt.handle_connected(tried[1].0), Some(HomeChange::Found));
    assert_eq!(hunt.home(), Some(tried[1].0));
    assert_eq!(outputs(&mut hunt).1, [tried[0].0, tried[2].0]);
    assert_eq!(hunt.poll_timeout(), None, "SH3: T5 is stopped");
}

#[test]
fn failed_attempt_is_replaced_until_round_pauses() {
    let mut hunt = hunt(4);
    hunt.start(START);
    let (tried, _) = outputs(&mut hunt);
    assert_eq!(hunt.handle_lost(START, tried[0].0), None);
    let (next, _) = outputs(&mut hunt);
    assert_eq!(next.len(), 1);
    assert!(tried.iter().all(|(_, address)| *address != next[0].1));
    assert_eq!(hunt.handle_lost(START, next[0].0), None);
    assert_eq!(hunt.handle_lost(START, tried[1].0), None);
    assert_eq!(
        hunt.handle_lost(START, tried[2].0),
        Some(HomeChange::NotFound)
    );
    assert_eq!(hunt.poll_timeout(), Some(START + hunt.config.pause));
    assert!(outputs(&mut hunt).0.is_empty());
    hunt.handle_timeout(START + hunt.config.pause);
    assert_eq!(outputs(&mut hunt).0.len(), 3);
}

#[test]
fn t5_doubles_up_to_maximum_and_resets_when_home_is_found() {
    let mut hunt = hunt(1);
    let first = hunt.config.timeout;
    hunt.config.attempt_timeout = hunt.config.timeout_max;
    hunt.start(START);
    let mut now = START;
    for times in [1, 2, 4, 6, 6] {
        let due = hunt.poll_timeout().expect("T5 runs");
        assert_eq!(due - now, first * times);
        now = due;
        let (tried, _) = outputs(&mut hunt);
        assert_eq!(hunt.handle_timeout(now), Some(HomeChange::NotFound));
        assert_eq!(hunt.outputs[0], Output::Close { link: tried[0].0 }, "SH5.2");
    }
    let (tried, _) = outputs(&mut hunt);
    hunt.handle_connected(tried[tried.len() - 1].0);
    hunt.drop_home(now);
    assert_eq!(hunt.poll_timeout(), Some(now + first));
}

/// A registrar that admits no client, for instance because its TLS rejects the certificate, closes the link only after
/// the handshake.
#[test]
fn registrar_that_closes_every_link_is_retried_with_pauses() {
    let mut hunt = hunt(1);
    hunt.start(START);
    let mut now = START;
    for times in [1, 2, 4, 8, 16, 25, 25] {
        let (tried, _) = outputs(&mut hunt);
        assert_eq!(tried.len(), 1);
        assert_eq!(hunt.handle_connected(tried[0].0), Some(HomeChange::Found));
        assert_eq!(hunt.handle_lost(now, tried[0].0), Some(HomeChange::Lost));
        assert!(outputs(&mut hunt).0.is_empty());
        let due = hunt.poll_timeout().expect("a pause");
        assert_eq!(due - now, hunt.config.pause * times);
        now = due;
        assert_eq!(hunt.handle_timeout(now), None);
    }
    // A registrar that has sent a message is called again at once.
    let (tried, _) = outputs(&mut hunt);
    hunt.handle_connected(tried[0].0);
    hunt.note_message(tried[0].0);
    hunt.handle_lost(now, tried[0].0);
    assert_eq!(outputs(&mut hunt).0.len(), 1);
}

#[test]
fn silent_registrar_delays_hunt_by_one_attempt() {
    for seed in 0..20 {
        let mut hunt = hunt(2);
        hunt.random = SecretSeedRng::new([seed; 32]);
        hunt.config.parallel = 1;
        // The state after many rounds in vain, when a round takes a minute.
        hunt.failed_rounds = 10;
        hunt.start(START);
        let (silent, _) = outputs(&mut hunt);
        let due = START + hunt.config.attempt_timeout;
        assert_eq!(hunt.poll_timeout(), Some(due));
        assert_eq!(hunt.handle_timeout(due), None);
        let (next, closed) = outputs(&mut hunt);
        assert_eq!(closed, [silent[0].0]);
        assert_ne!(next[0].1, silent[0].1);
        assert_eq!(hunt.handle_connected(next[0].0), Some(HomeChange::Found));
    }
}

#[test]
fn silent_registrar_is_retried_within_pause_max() {
    let mut hunt = hunt(1);
    hunt.failed_rounds = 10;
    hunt.start(START);
    let due = START + hunt.config.attempt_timeout;
    assert_eq!(hunt.handle_timeout(due), Some(HomeChange::NotFound));
    let retry_at = due + hunt.config.pause_max;
    assert_eq!(hunt.poll_timeout(), Some(retry_at));
    outputs(&mut hunt);
    assert_eq!(hunt.handle_timeout(retry_at), None);
    assert_eq!(outputs(&mut hunt).0.len(), 1);
}

#[test]
fn next_round_starts_with_untried_registrars() {
    let mut hunt = hunt(5);
    hunt.config.attempt_timeout = hunt.config.timeout_max;
    hunt.start(START);
    let (first, _) = outputs(&mut hunt);
    hunt.handle_timeout(START + hunt.config.timeout);
    let (second, closed) = outputs(&mut hunt);
    assert_eq!(closed.len(), 3);
    let was_tried =
        |(_, address): &&(LinkId, Transport)| first.iter().any(|(_, tried)| tried == address);
    assert_eq!(
        second.iter().filter(was_tried).count(),
        1,
        "two of five were left"
    );
}

#[test]
fn lost_home_is_tried_last() {
    for seed in 0..20 {
        let mut hunt = hunt(3);
        hunt.random = SecretSeedRng::new([seed; 32]);
        hunt.config.parallel = 1;
        hunt.start(START);
        let (tried, _) = outputs(&mut hunt);
        hunt.handle_connected(tried[0].0);
        assert_eq!(hunt.handle_lost(START, tried[0].0), Some(HomeChange::Lost));
        for _ in 0..2 {
            let (next, _) = outputs(&mut hunt);
            assert_ne!(next[0].1, tried[0].1);
            hunt.handle_lost(START, next[0].0);
        }
        assert_eq!(outputs(&mut hunt).0[0].1, tried[0].1);
    }
}

#[test]
fn announces_are_used_only_if_trusted_and_until_they_expire() {
    let announce = |hunt: &mut ServerHunt<()>, port, transports| {
        hunt.handle_announce(START, RegistrarId(7), transports, Some(server(port)));
    };
    let mut distrusting = hunt(0);
    distrusting.start(START);
    announce(&mut distrusting, 1, vec![server(1)]);
    assert!(outputs(&mut distrusting).0.is_empty());

    let mut hunt = hunt(0);
    hunt.config.trust_announces = true;
    hunt.start(START);
    announce(&mut hunt, 1, Vec::new());
    let (tried, _) = outputs(&mut hunt);
    assert_eq!(tried[0].1, server(1), "without transports, its source");
    hunt.handle_connected(tried[0].0);
    assert_eq!(hunt.home_id(), Some(RegistrarId(7)));
    let later = START + hunt.config.announce_life;
    hunt.handle_lost(later, tried[0].0);
    assert!(outputs(&mut hunt).0.is_empty(), "T7 has expired");
}

#[test]
fn announce_flood_is_bounded() {
    let mut hunt = hunt(1);
    hunt.config.trust_announces = true;
    for port in 2..10_000 {
        hunt.handle_announce(START, RegistrarId(7), vec![server(port)], None);
    }
    let mut attempts = 0;
    hunt.config.parallel = 1;
    hunt.start(START);
    while let Some((link, _)) = outputs(&mut hunt).0.first() {
        attempts += 1;
        hunt.handle_lost(START, *link);
    }
    assert!(attempts <= 65, "{attempts} registrars");
}

#[test]
fn keep_alive_with_home_flag_replaces_home() {
    let mut hunt = hunt(2);
    hunt.start(START);
    let (tried, _) = outputs(&mut hunt);
    let accepted_link = LinkId::Accepted(1);
    assert_eq!(
        hunt.adopt(accepted_link, RegistrarId(5)),
        Some(HomeChange::Found)
    );
    assert_eq!(outputs(&mut hunt).1.len(), tried.len());
    assert_eq!(
        (hunt.home(), hunt.home_id()),
        (Some(accepted_link), Some(RegistrarId(5)))
    );
    assert_eq!(hunt.adopt(accepted_link, RegistrarId(5)), None);
    assert_eq!(
        hunt.adopt(LinkId::Accepted(2), RegistrarId(6)),
        Some(HomeChange::Found)
    );
    assert_eq!(outputs(&mut hunt).1, [accepted_link]);
}

#[test]
fn elements_try_only_sctp_registrars() {
    let tcp = Transport::Tcp {
        port: 1,
        usage: TransportUse::DataOnly,
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
    };
    for (reach, tried) in [
        (RegistrarTransports::Sctp, 0),
        (RegistrarTransports::SctpAndTcp, 1),
    ] {
        let mut config = ServerHuntConfig::new(Vec::new());
        config.trust_announces = true;
        let mut hunt = ServerHunt::new(config, [1; 32], reach);
        hunt.start(START);
        hunt.handle_announce(START, RegistrarId(7), vec![tcp.clone()], None);
        assert_eq!(outputs(&mut hunt).0.len(), tried);
    }
}
