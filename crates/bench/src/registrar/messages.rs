//! Messages of elements and users.

use std::net::IpAddr;

use anyhow::{Context, Result, bail, ensure};
use bytes::{Bytes, BytesMut};
use holdfast_sctp::MessageToSend as Packet;
use holdfast_wire::rserpool::asap::{Message, PPID};
use holdfast_wire::rserpool::{
    Addresses, ElementId, Policy, PolicyKind, PoolElement, PoolHandle, RegistrarId, SctpTransport,
    Transport, TransportUse,
};
use rand::Rng;
use rand::rngs::SmallRng;

/// Registration life, long enough for every measurement both as milliseconds and as seconds.
const REGISTRATION_LIFE: i32 = 3_600_000;
/// Port at which users would reach the elements.
const SERVICE_PORT: u16 = 4711;
/// Levels of load.
const LOAD_LEVELS: u32 = 16;

/// Message types, the first byte of a message.
pub(super) const REGISTRATION_RESPONSE: u8 = 0x03;
pub(super) const DEREGISTRATION_RESPONSE: u8 = 0x04;
pub(super) const HANDLE_RESOLUTION_RESPONSE: u8 = 0x06;
pub(super) const ENDPOINT_KEEP_ALIVE: u8 = 0x07;
pub(super) const ERROR: u8 = 0x0e;

/// Properties shared by all elements and users of a pool.
#[derive(Clone, Debug)]
pub(super) struct PoolMessages {
    pub(super) handle: PoolHandle,
    pub(super) policy: PolicyKind,
    /// Elements requested per answer; by default the registrar's choice.
    pub(super) items: Option<u32>,
}

/// Returns the id of the element at this place, different for each place; 0 is no id.
pub(super) fn element_id(place: usize) -> ElementId {
    ElementId((place as u32 + 1).wrapping_mul(0x9e37_79b1))
}

impl PoolMessages {
    /// Returns true if each registration of an element has other policy values.
    pub(super) fn has_changing_policy(&self) -> bool {
        self.policy == PolicyKind::LeastUsed
    }

    fn random_policy(&self, random: &mut SmallRng) -> Policy {
        match self.policy.zeroed() {
            Policy::WeightedRoundRobin { .. } => Policy::WeightedRoundRobin { weight: 1 },
            Policy::WeightedRandom { .. } => Policy::WeightedRandom { weight: 1 },
            Policy::LeastUsed { .. } => {
                let load = random.random_range(0..LOAD_LEVELS) * (u32::MAX / LOAD_LEVELS);
                Policy::LeastUsed { load }
            }
            other => other,
        }
    }

    fn pool_element(&self, place: usize, at: IpAddr, random: &mut SmallRng) -> PoolElement {
        PoolElement {
            id: element_id(place),
            home: RegistrarId(0),
            registration_life: REGISTRATION_LIFE,
            user_transport: Transport::Tcp {
                port: SERVICE_PORT,
                usage: TransportUse::DataOnly,
                address: at,
            },
            policy: self.random_policy(random),
            asap_transport: None,
        }
    }

    /// Returns a registration or re-registration of the element at this place, at a host with this address.
    pub(super) fn registration(
        &self,
        place: usize,
        at: IpAddr,
        random: &mut SmallRng,
    ) -> Result<Packet> {
        encode(&Message::Registration {
            handle: self.handle.clone(),
            element: self.pool_element(place, at, random),
        })
    }

    pub(super) fn deregistration(&self, place: usize) -> Result<Packet> {
        encode(&Message::Deregistration {
            handle: self.handle.clone(),
            id: element_id(place),
        })
    }

    pub(super) fn resolution(&self) -> Result<Packet> {
        encode(&Message::HandleResolution {
            updates: false,
            handle: self.handle.clone(),
            items_max: self.items,
        })
    }

    /// Returns the lengths of a re-registration and its answer, bytes.
    pub(super) fn registration_lengths(&self, at: IpAddr) -> Result<(usize, usize)> {
        let mut random = rand::SeedableRng::seed_from_u64(0);
        let answer = Message::RegistrationResponse {
            rejected: false,
            handle: self.handle.clone(),
            id: element_id(0),
            causes: Vec::new(),
        };
        let registration = self.registration(0, at, &mut random)?;
        Ok((registration.data.len(), encode(&answer)?.data.len()))
    }

    /// Returns the lengths of a resolution and its answer with `items` elements, bytes.
    pub(super) fn resolution_lengths(&self, at: IpAddr, items: usize) -> Result<(usize, usize)> {
        let mut random = rand::SeedableRng::seed_from_u64(0);
        let mut element = self.pool_element(0, at, &mut random);
        element.asap_transport = Some(SctpTransport {
            port: SERVICE_PORT,
            usage: TransportUse::DataOnly,
            addresses: [at].into_iter().collect::<Addresses>(),
        });
        let answer = Message::HandleResolutionResponse {
            updates: false,
            handle: self.handle.clone(),
            policy: Some(self.policy.zeroed()),
            elements: vec![element; items],
            causes: Vec::new(),
        };
        Ok((self.resolution()?.data.len(), encode(&answer)?.data.len()))
    }
}

fn encode(message: &Message) -> Result<Packet> {
    let mut bytes = BytesMut::new();
    message.encode(&mut bytes)?;
    Ok(Packet::new(PPID, bytes.freeze()))
}

/// Parses an answer completely, and checks that it reports no error.
pub(super) fn check_answer(bytes: &Bytes) -> Result<()> {
    let parsed = Message::parse(bytes);
    let parsed = parsed.map_err(|error| anyhow::anyhow!("cannot parse an answer: {error:?}"))?;
    match &parsed.message {
        Message::RegistrationResponse {
            rejected, causes, ..
        } => {
            ensure!(!rejected, "a registration was refused: {causes:?}");
        }
        Message::DeregistrationResponse { causes, .. } => {
            ensure!(
                causes.is_empty(),
                "a deregistration was refused: {causes:?}"
            );
        }
        Message::HandleResolutionResponse {
            elements, causes, ..
        } => {
            ensure!(
                !elements.is_empty(),
                "a resolution returned no elements: {causes:?}"
            );
        }
        other => bail!("received {other:?} instead of an answer"),
    }
    Ok(())
}

/// Returns the answer to a keep-alive; without an element id, as in the RFC, the answer is for the element at `place`.
pub(super) fn keep_alive_ack(bytes: &Bytes, place: usize) -> Result<Packet> {
    let parsed = Message::parse(bytes)
        .ok()
        .context("cannot parse a keep-alive")?;
    let Message::EndpointKeepAlive { handle, id, .. } = parsed.message else {
        bail!("received another message instead of a keep-alive");
    };
    let id = id.unwrap_or(element_id(place));
    encode(&Message::EndpointKeepAliveAck { handle, id })
}
