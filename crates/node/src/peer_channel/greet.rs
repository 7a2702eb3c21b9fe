//! The greeting: a `Hello` each way, checked against the certificate, and in a configured group against the
//! configuration. A node that refuses another says why before it closes the connection.

use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use holdfast_daemon::tls::node_name;
use holdfast_proto::greeting::compare;
use holdfast_wire::greeting::NodeFacts;
use holdfast_wire::{Frame, FrameError, NodeId};

use super::PeerConnectionError;
use super::connection::PeerConnection;
use super::peer::Peer;
use super::peers::PeerChannelState;

/// A greeting that was received.
struct Greeting {
    node: NodeId,
    boot: u64,
    facts: NodeFacts,
}

/// Greets the node that was dialled as `peer`. Returns its boot id.
pub(super) async fn greet_as_dialler(
    state: &PeerChannelState,
    link: &PeerConnection,
    peer: &Peer,
) -> Result<u64, PeerConnectionError> {
    link.send(&hello(state))?;
    let greeting = parse_hello(state, link.next_frame().await?, true)?;
    // TLS has already checked that the certificate is that of the dialled node.
    if !state.is_self_running() && Some(greeting.node) != peer.number() {
        return Err(PeerConnectionError::WrongNode {
            claimed: greeting.node,
            certificate: certificate_owner(link),
        });
    }
    check_facts(state, peer, &greeting, true)?;
    state.recheck_certificate(link)?;
    Ok(greeting.boot)
}

/// Greets the node that was dialled by its address. Returns the node, and its boot id.
pub(super) async fn greet_unknown_node(
    state: &PeerChannelState,
    link: &PeerConnection,
) -> Result<(Rc<Peer>, u64), PeerConnectionError> {
    link.send(&hello(state))?;
    let greeting = parse_hello(state, link.next_frame().await?, true)?;
    let peer = state.peer_with_certificate(link)?;
    check_facts(state, &peer, &greeting, true)?;
    state.recheck_certificate(link)?;
    Ok((peer, greeting.boot))
}

/// Receives and answers the greeting of a node that dialled this one. Returns the node, and its boot id.
pub(super) async fn greet_as_listener(
    state: &PeerChannelState,
    link: &PeerConnection,
) -> Result<(Rc<Peer>, u64), PeerConnectionError> {
    let greeted = listen_to_greeting(state, link).await;
    match &greeted {
        Ok(_) => link.send(&hello(state))?,
        // Best effort, since the connection ends anyway. Every release can read the version in a greeting.
        Err(PeerConnectionError::Frame(FrameError::Version(_))) => drop(link.send(&hello(state))),
        Err(reason) => {
            if let Some(reason) = reason.refusal() {
                let _ = link.send(&Frame::Refused { reason });
            }
        }
    }
    greeted
}

async fn listen_to_greeting(
    state: &PeerChannelState,
    link: &PeerConnection,
) -> Result<(Rc<Peer>, u64), PeerConnectionError> {
    let greeting = parse_hello(state, link.next_frame().await?, false)?;
    let peer = match state.is_self_running() {
        true => state.peer_with_certificate(link)?,
        false => configured_peer(state, link, greeting.node)?,
    };
    check_facts(state, &peer, &greeting, false)?;
    if peer.is_other_host(greeting.boot, link.remote_ip()) {
        return Err(PeerConnectionError::TwoHosts(peer.name.clone()));
    }
    state.recheck_certificate(link)?;
    Ok((peer, greeting.boot))
}

/// Returns the configured peer with this number, if the certificate is that peer's.
fn configured_peer(
    state: &PeerChannelState,
    link: &PeerConnection,
    claimed: NodeId,
) -> Result<Rc<Peer>, PeerConnectionError> {
    let name = link.certificates().first().and_then(node_name);
    if claimed == state.own_number() && name.as_ref() == Some(&state.options.name) {
        return Err(PeerConnectionError::OwnName(state.options.name.clone()));
    }
    let peer = state.get(claimed);
    let peer = peer.filter(|peer| Some(&peer.name) == name.as_ref());
    peer.ok_or_else(|| PeerConnectionError::WrongNode {
        claimed,
        certificate: certificate_owner(link),
    })
}

/// Compares the facts of a peer with those of this node. Differences that do not keep the nodes apart are noted at the
/// peer.
fn check_facts(
    state: &PeerChannelState,
    peer: &Peer,
    greeting: &Greeting,
    is_dialler: bool,
) -> Result<(), PeerConnectionError> {
    let differences = compare(&own_facts(state), &greeting.facts, is_dialler)
        .map_err(PeerConnectionError::Disagreement)?;
    peer.note_disagreements(differences.iter().map(ToString::to_string).collect());
    Ok(())
}

fn own_facts(state: &PeerChannelState) -> NodeFacts {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH);
    NodeFacts {
        release: env!("CARGO_PKG_VERSION").to_owned(),
        clock_ms: clock.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(0)),
        mode: state.options.mode,
    }
}

fn hello(state: &PeerChannelState) -> Frame {
    Frame::Hello {
        node: state.own_number(),
        boot: state.options.boot,
        group: state.options.group.clone(),
        facts: own_facts(state),
    }
}

fn parse_hello(
    state: &PeerChannelState,
    frame: Frame,
    is_dialler: bool,
) -> Result<Greeting, PeerConnectionError> {
    let ours = &state.options.group;
    match frame {
        Frame::Hello {
            node,
            boot,
            group,
            facts,
        } if group == *ours => Ok(Greeting { node, boot, facts }),
        Frame::Hello { group, .. } => Err(PeerConnectionError::WrongGroup {
            ours: ours.clone(),
            theirs: group,
        }),
        Frame::Refused { reason } if is_dialler => Err(PeerConnectionError::RefusedByPeer(reason)),
        other => Err(PeerConnectionError::UnexpectedFrame(other.name())),
    }
}

fn certificate_owner(link: &PeerConnection) -> String {
    let certificates = link.certificates();
    match certificates.first().and_then(node_name) {
        Some(name) => format!("node `{name}`"),
        None => "no node".to_owned(),
    }
}
