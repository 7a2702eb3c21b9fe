//! The greeting: a `Hello` each way, checked against the certificate and the configuration.

use holdfast_daemon::tls::node_name;
use holdfast_wire::{Frame, NodeId};

use super::connection::PeerConnection;
use super::peers::PeerChannelState;
use super::{PeerChannelOptions, PeerConnectionError};

/// Greets the node that was dialled as `peer`. Returns its boot id.
pub(super) async fn greet_as_dialler(
    options: &PeerChannelOptions,
    link: &PeerConnection,
    peer: NodeId,
) -> Result<u64, PeerConnectionError> {
    link.send(&hello(options))?;
    let (node, boot) = parse_hello(options, link.next_frame().await?)?;
    if node != peer {
        // TLS has already checked that the certificate is that of the dialled node.
        let certificate = certificate_owner(link);
        let claimed = node;
        return Err(PeerConnectionError::WrongNode {
            claimed,
            certificate,
        });
    }
    Ok(boot)
}

/// Receives and answers the greeting of a node that dialled this one. Returns its node id and boot id.
pub(super) async fn greet_as_listener(
    state: &PeerChannelState,
    link: &PeerConnection,
) -> Result<(NodeId, u64), PeerConnectionError> {
    let options = &state.options;
    let (node, boot) = parse_hello(options, link.next_frame().await?)?;
    let name = link.certificates().first().and_then(node_name);
    let peer = options.peers.iter().find(|peer| peer.id == node);
    if peer.is_none_or(|peer| Some(&peer.name) != name.as_ref()) {
        return Err(PeerConnectionError::WrongNode {
            claimed: node,
            certificate: certificate_owner(link),
        });
    }
    link.send(&hello(options))?;
    Ok((node, boot))
}

fn hello(options: &PeerChannelOptions) -> Frame {
    Frame::Hello {
        node: options.node,
        boot: options.boot,
        group: options.group.clone(),
    }
}

fn parse_hello(
    options: &PeerChannelOptions,
    frame: Frame,
) -> Result<(NodeId, u64), PeerConnectionError> {
    match frame {
        Frame::Hello { node, boot, group } if group == options.group => Ok((node, boot)),
        Frame::Hello { group, .. } => Err(PeerConnectionError::WrongGroup {
            ours: options.group.clone(),
            theirs: group,
        }),
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
