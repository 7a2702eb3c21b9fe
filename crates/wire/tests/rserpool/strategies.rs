//! Proptest strategies for every message.

use crate::codec::Message;
use bytes::Bytes;
use holdfast_wire::rserpool::enrp::{EnrpBody, PoolEntry, UpdateAction};
use holdfast_wire::rserpool::{
    CauseCode, ElementId, ErrorCause, Policy, PolicyKind, PoolElement, PoolHandle, RegistrarId,
    SctpTransport, ServerInformation, Transport, TransportUse, asap, enrp,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use std::net::IpAddr;

fn blob() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

fn handle() -> impl Strategy<Value = PoolHandle> {
    blob().prop_map(PoolHandle)
}

fn element_id() -> impl Strategy<Value = ElementId> {
    any::<u32>().prop_map(ElementId)
}

fn registrar() -> impl Strategy<Value = RegistrarId> {
    any::<u32>().prop_map(RegistrarId)
}

fn address() -> impl Strategy<Value = IpAddr> {
    any::<IpAddr>().prop_map(|address| address.to_canonical())
}

/// Builds a policy from as many of these figures as it has.
fn policy_with_figures(kind: PolicyKind, figures: [u32; 4]) -> Policy {
    let read = |count: usize| {
        let length = 8 + 4 * count as u16;
        let mut bytes = [8u16.to_be_bytes(), length.to_be_bytes()].concat();
        bytes.extend(kind.number().to_be_bytes());
        bytes.extend(
            figures[..count]
                .iter()
                .flat_map(|figure| figure.to_be_bytes()),
        );
        let code = CauseCode::INCONSISTENT_POLICY;
        let data = bytes.into();
        ErrorCause { code, data }.policy()
    };
    let mut policies = (0..=4).filter_map(read);
    let policy = policies
        .next()
        .expect("a policy for some number of figures");
    assert_eq!(
        policies.next(),
        None,
        "a policy for one number of figures only"
    );
    policy
}

fn policy() -> impl Strategy<Value = Policy> {
    (select(PolicyKind::ALL), any::<[u32; 4]>())
        .prop_map(|(kind, figures)| policy_with_figures(kind, figures))
}

fn usage() -> impl Strategy<Value = TransportUse> {
    select(&[TransportUse::DataOnly, TransportUse::DataAndControl][..])
}

fn sctp() -> impl Strategy<Value = SctpTransport> {
    (any::<u16>(), usage(), vec(address(), 1..5)).prop_map(|(port, usage, addresses)| {
        SctpTransport {
            port,
            usage,
            addresses: addresses.into(),
        }
    })
}

fn transport() -> impl Strategy<Value = Transport> {
    let port_and_address = || (any::<u16>(), address());
    prop_oneof![
        (port_and_address(), any::<u32>()).prop_map(|((port, address), service_code)| {
            Transport::Dccp {
                port,
                service_code,
                address,
            }
        }),
        sctp().prop_map(Transport::Sctp),
        (port_and_address(), usage()).prop_map(|((port, address), usage)| Transport::Tcp {
            port,
            usage,
            address
        }),
        port_and_address().prop_map(|(port, address)| Transport::Udp { port, address }),
        port_and_address().prop_map(|(port, address)| Transport::UdpLite { port, address }),
        blob().prop_map(Transport::Opaque),
    ]
}

fn element() -> impl Strategy<Value = PoolElement> {
    (
        (element_id(), registrar(), any::<i32>()),
        transport(),
        policy(),
        option::of(sctp()),
    )
        .prop_map(
            |((id, home, registration_life), user_transport, policy, asap_transport)| PoolElement {
                id,
                home,
                registration_life,
                user_transport,
                policy,
                asap_transport,
            },
        )
}

fn elements() -> impl Strategy<Value = Vec<PoolElement>> {
    vec(element(), 0..5)
}

fn causes(at_least: usize) -> impl Strategy<Value = Vec<ErrorCause>> {
    let other = (any::<u16>(), blob()).prop_map(|(code, data)| ErrorCause {
        code: CauseCode(code),
        data,
    });
    let cause = prop_oneof![
        other,
        policy().prop_map(|policy| ErrorCause::inconsistent_policy(&policy)),
        transport().prop_map(|transport| ErrorCause::inconsistent_transport(&transport)),
    ];
    vec(cause, at_least..4)
}

fn element_message() -> impl Strategy<Value = asap::Message> {
    use asap::Message;
    prop_oneof![
        (handle(), element())
            .prop_map(|(handle, element)| Message::Registration { handle, element }),
        (handle(), element_id()).prop_map(|(handle, id)| Message::Deregistration { handle, id }),
        (any::<bool>(), handle(), element_id(), causes(0)).prop_map(
            |(rejected, handle, id, causes)| Message::RegistrationResponse {
                rejected,
                handle,
                id,
                causes
            }
        ),
        (handle(), element_id(), causes(0)).prop_map(|(handle, id, causes)| {
            Message::DeregistrationResponse { handle, id, causes }
        }),
        (
            any::<bool>(),
            registrar(),
            handle(),
            option::of(element_id())
        )
            .prop_map(|(home, registrar, handle, id)| Message::EndpointKeepAlive {
                home,
                registrar,
                handle,
                id
            }),
        (handle(), element_id())
            .prop_map(|(handle, id)| Message::EndpointKeepAliveAck { handle, id }),
    ]
}

fn user_message() -> impl Strategy<Value = asap::Message> {
    use asap::Message;
    let response = (
        any::<bool>(),
        handle(),
        option::of(policy()),
        elements(),
        causes(0),
    );
    prop_oneof![
        (any::<bool>(), handle(), option::of(any::<u32>())).prop_map(
            |(updates, handle, items_max)| {
                Message::HandleResolution {
                    updates,
                    handle,
                    items_max,
                }
            }
        ),
        response.prop_map(|(updates, handle, policy, elements, causes)| {
            Message::HandleResolutionResponse {
                updates,
                handle,
                policy,
                elements,
                causes,
            }
        }),
        (handle(), element_id())
            .prop_map(|(handle, id)| Message::EndpointUnreachable { handle, id }),
        (registrar(), vec(transport(), 0..3)).prop_map(|(registrar, transports)| {
            Message::ServerAnnounce {
                registrar,
                transports,
            }
        }),
        blob().prop_map(Message::Cookie),
        blob().prop_map(Message::CookieEcho),
        (handle(), option::of(policy()), elements()).prop_map(|(handle, policy, elements)| {
            Message::BusinessCard {
                handle,
                policy,
                elements,
            }
        }),
        causes(0).prop_map(Message::Error),
        (handle(), element_id()).prop_map(|(handle, id)| Message::Probe { handle, id }),
        (
            handle(),
            element_id(),
            any::<u32>(),
            option::of(any::<u32>())
        )
            .prop_map(|(handle, id, in_flight, latency_us)| Message::ProbeAnswer {
                handle,
                id,
                in_flight,
                latency_us
            }),
    ]
}

fn body() -> impl Strategy<Value = EnrpBody> {
    let server =
        || (registrar(), sctp()).prop_map(|(id, transport)| ServerInformation { id, transport });
    let entry =
        (handle(), elements()).prop_map(|(handle, elements)| PoolEntry { handle, elements });
    let action = select(&[UpdateAction::Add, UpdateAction::Delete][..]);
    prop_oneof![
        (
            any::<bool>(),
            option::of(any::<u16>()),
            option::of(server())
        )
            .prop_map(|(reply_required, checksum, server)| EnrpBody::Presence {
                reply_required,
                checksum,
                server
            }),
        any::<bool>().prop_map(|own_only| EnrpBody::HandleTableRequest { own_only }),
        (any::<bool>(), any::<bool>(), vec(entry, 0..4)).prop_map(|(rejected, more, entries)| {
            EnrpBody::HandleTableResponse {
                rejected,
                more,
                entries,
            }
        }),
        (any::<bool>(), action, handle(), element()).prop_map(
            |(takeover_suggested, action, handle, element)| EnrpBody::HandleUpdate {
                takeover_suggested,
                action,
                handle,
                element
            }
        ),
        Just(EnrpBody::ListRequest),
        (any::<bool>(), vec(server(), 0..4))
            .prop_map(|(rejected, servers)| EnrpBody::ListResponse { rejected, servers }),
        registrar().prop_map(|target| EnrpBody::InitTakeover { target }),
        registrar().prop_map(|target| EnrpBody::InitTakeoverAck { target }),
        registrar().prop_map(|target| EnrpBody::TakeoverServer { target }),
        causes(0).prop_map(EnrpBody::Error),
    ]
}

pub fn message() -> impl Strategy<Value = Message> {
    let enrp = (registrar(), registrar(), body()).prop_map(|(sender, receiver, body)| {
        Message::Enrp(enrp::Message {
            sender,
            receiver,
            body,
        })
    });
    prop_oneof![
        element_message().prop_map(Message::Asap),
        user_message().prop_map(Message::Asap),
        enrp
    ]
}
