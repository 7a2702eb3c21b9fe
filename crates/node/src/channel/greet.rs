//! The greeting: a `Hello` each way, checked against the certificate and the configuration.

use holdfast_wire::{Frame, NodeId};

use super::link::Link;
use super::peers::Table;
use super::{LinkError, Options};
use crate::tls::node_name;

/// Greets the node that was dialled as `peer`. Returns its boot id.
pub(super) async fn greet_as_dialler(
    options: &Options,
    link: &Link,
    peer: NodeId,
) -> Result<u64, LinkError> {
    link.send(&hello(options))?;
    let (node, boot) = parse_hello(options, link.next_frame().await?)?;
    if node != peer {
        // TLS has already checked that the certificate is that of the dialled node.
        let certificate = certificate_owner(link);
        let claimed = node;
        return Err(LinkError::WrongNode {
            claimed,
            certificate,
        });
    }
    Ok(boot)
}

/// Receives and answers the greeting of a node that dialled this one. Returns its node id and boot id.
pub(super) async fn greet_as_listener(
    table: &Table,
    link: &Link,
) -> Result<(NodeId, u64), LinkError> {
    let options = &table.options;
    let (node, boot) = parse_hello(options, link.next_frame().await?)?;
    let name = link.certificates().first().and_then(node_name);
    let peer = options.peers.iter().find(|peer| peer.id == node);
    if peer.is_none_or(|peer| Some(&peer.name) != name.as_ref()) {
        return Err(LinkError::WrongNode {
            claimed: node,
            certificate: certificate_owner(link),
        });
    }
    link.send(&hello(options))?;
    Ok((node, boot))
}

fn hello(options: &Options) -> Frame {
    Frame::Hello {
        node: options.node,
        boot: options.boot,
        group: options.group.clone(),
    }
}

fn parse_hello(options: &Options, frame: Frame) -> Result<(NodeId, u64), LinkError> {
    match frame {
        Frame::Hello { node, boot, group } if group == options.group => Ok((node, boot)),
        Frame::Hello { group, .. } => Err(LinkError::WrongGroup {
            ours: options.group.clone(),
            theirs: group,
        }),
        other => Err(LinkError::UnexpectedFrame(other.name())),
    }
}

fn certificate_owner(link: &Link) -> String {
    let certificates = link.certificates();
    match certificates.first().and_then(node_name) {
        Some(name) => format!("node `{name}`"),
        None => "no node".to_owned(),
    }
}
