//! Elements of this host's programs, with the programs' numbers.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use holdfast_api::control::PolicyDetail;
use holdfast_api::pool::{Departure, ElementEvent, FromPool, Registration, Service as Wanted};
use holdfast_proto::pool_element::{
    self, Config, Event, HuntConfig, Link, PoolElement, SessionEvent, Sessions, SessionsConfig,
};
use holdfast_sys::transport::{self, Config as EndpointConfig, Endpoint};
use holdfast_wire::rserpool::asap::Message;
use holdfast_wire::rserpool::{
    Cause, ElementId, Policy, PoolHandle, SctpTransport, Transport, TransportUse,
};

use super::event_loop::Daemon;
use super::links::{Owner, Place};
use super::policy;
use crate::config::pool::{PoolConfig, RegistrarAt, cookie_keys};
use crate::entries::handle_of;
use crate::sctp::{data_transport, reached_at, source_towards};

/// Maximum number of users of an element.
const USERS_MAX: usize = 20_000;

/// An element.
pub(super) struct Element {
    pub(super) handle: PoolHandle,
    pub(super) machine: PoolElement,
    /// Identifier under which [`Names`](super::names::Names) lists the element; the machine may take another one.
    pub(super) named: Option<ElementId>,
    /// Transport address for its users.
    pub(super) at: Transport,
    /// Sessions with its users, if the daemon accepts them.
    pub(super) service: Option<Service>,
}

/// Sessions of an element with its users.
pub(super) struct Service {
    pub(super) endpoint: Box<dyn Endpoint>,
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) sessions: Sessions,
    /// Links of the users.
    pub(super) users: std::collections::BTreeSet<Link>,
}

impl Daemon {
    /// Registers a program as an element.
    pub(super) fn register(&mut self, number: u64, wanted: Registration) -> Result<(), String> {
        let handle = handle_of(&wanted.handle).map_err(|error| error.to_string())?;
        let policy = policy::parse(&wanted.policy)?;
        let life = wanted
            .life_ms
            .map_or(self.config.life, Duration::from_millis);
        if life < Duration::from_secs(1) {
            return Err("a registration's life must be at least 1000 ms".to_owned());
        }
        let (at, service) = self.serve_at(&wanted, &handle, policy)?;
        let hunt = hunt(&self.config);
        let seed = rand::random();
        let mut config = Config::new(handle.clone(), at.clone(), policy, hunt, seed);
        config.life = Some(life);
        config.life_unit = self.config.life_unit;
        config.update_interval = self.config.update_interval;
        let element = Element {
            handle,
            machine: PoolElement::new(config),
            named: None,
            at,
            service,
        };
        let service = element.service.iter();
        self.services
            .extend(service.flat_map(|service| &service.addresses));
        self.elements.insert(number, element);
        let now = self.now();
        self.with_machine(number, |machine| machine.handle_register(now));
        self.carry_out(Owner::Element(number));
        Ok(())
    }

    fn serve_at(
        &self,
        wanted: &Registration,
        handle: &PoolHandle,
        policy: Policy,
    ) -> Result<(Transport, Option<Service>), String> {
        let usage = TransportUse::DataOnly;
        let at = match &wanted.service {
            Wanted::Tcp(at) => Transport::Tcp {
                port: at.port(),
                usage,
                address: self.reached(at.ip())?,
            },
            Wanted::Udp(at) => Transport::Udp {
                port: at.port(),
                address: self.reached(at.ip())?,
            },
            Wanted::Sctp(at) => {
                let port = at.first().ok_or("an SCTP service needs an address")?.port();
                if at.iter().any(|at| at.port() != port) {
                    return Err("an SCTP service has one port".to_owned());
                }
                let addresses = at.iter().map(|at| self.reached(at.ip()));
                Transport::Sctp(SctpTransport {
                    port,
                    usage,
                    addresses: addresses.collect::<Result<_, _>>()?,
                })
            }
            Wanted::Sessions { addresses, port } => {
                let service = self.service(addresses, *port, wanted, handle, policy)?;
                let port = service.addresses.first().map_or(0, SocketAddr::port);
                let at = Transport::Sctp(SctpTransport {
                    port,
                    usage: TransportUse::DataAndControl,
                    addresses: service.addresses.iter().map(SocketAddr::ip).collect(),
                });
                return Ok((at, Some(service)));
            }
        };
        let (_, addresses) = crate::entries::transport(&at);
        if addresses.iter().any(|at| at.port() == 0) {
            return Err("a service needs a port other than 0".to_owned());
        }
        Ok((at, None))
    }

    /// Returns the address for users; replaces an unspecified one.
    fn reached(&self, address: IpAddr) -> Result<IpAddr, String> {
        if !address.is_unspecified() {
            return Ok(address);
        }
        self.own_address()
    }

    /// Returns this host's address that registrars see.
    fn own_address(&self) -> Result<IpAddr, String> {
        let own = self
            .config
            .listen
            .first()
            .filter(|own| !own.is_unspecified());
        if let Some(own) = own {
            return Ok(*own);
        }
        if let Some(first) = self.config.known_registrars().first() {
            return source_towards(first.address)
                .map_err(|error| format!("no way to the registrar {first}: {error}"));
        }
        let own = reached_at(self.own.as_ref());
        let own = own.map_err(|error| format!("{error}; name the service's address"))?;
        own.first()
            .map(SocketAddr::ip)
            .ok_or_else(|| "this host has no address; name the service's".to_owned())
    }

    fn service(
        &self,
        addresses: &[IpAddr],
        port: u16,
        wanted: &Registration,
        handle: &PoolHandle,
        policy: Policy,
    ) -> Result<Service, String> {
        let addresses = match addresses {
            [] => vec![self.own_address()?],
            named => named
                .iter()
                .map(|address| self.reached(*address))
                .collect::<Result<_, _>>()?,
        };
        let local = addresses.iter().map(|ip| SocketAddr::new(*ip, port));
        let config = EndpointConfig {
            raw: self.config.raw,
            encapsulation: self.own.encapsulation_port(),
            failure: self.config.failure,
            path_mtu: self.config.path_mtu,
            ..EndpointConfig::new(local.collect())
        };
        let open = || {
            let endpoint = transport::open(&config)?;
            let addresses = endpoint.local_addresses()?;
            std::io::Result::Ok((endpoint, addresses))
        };
        let (endpoint, addresses) =
            open().map_err(|error| format!("SCTP at {:?}: {error}", config.local))?;
        let sessions = Sessions::new(SessionsConfig {
            handle: handle.clone(),
            policy,
            keys: cookie_keys(wanted.cookie_keys.clone()),
        });
        Ok(Service {
            endpoint,
            addresses,
            sessions,
            users: Default::default(),
        })
    }

    /// Updates an element's policy information.
    pub(super) fn set_policy(&mut self, number: u64, detail: &PolicyDetail) -> Result<(), String> {
        let policy = policy::parse(detail)?;
        let now = self.now();
        let Some(element) = self.elements.get_mut(&number) else {
            return Ok(());
        };
        let told = element.machine.handle_policy(now, policy);
        self.carry_out(Owner::Element(number));
        told.map_err(|error| error.to_string())
    }

    /// Takes an element out of its pool; its users' sessions end at once.
    pub(super) fn deregister(&mut self, number: u64) {
        let now = self.now();
        let Some(element) = self.elements.get_mut(&number) else {
            return;
        };
        element.machine.handle_deregister(now);
        let links = element
            .service
            .as_ref()
            .map(|service| service.users.clone());
        for link in links.into_iter().flatten() {
            self.end_user(number, link);
        }
        self.carry_out(Owner::Element(number));
    }

    /// Calls `what` with an element's machine, if the element exists.
    pub(super) fn with_machine(&mut self, number: u64, what: impl FnOnce(&mut PoolElement)) {
        if let Some(element) = self.elements.get_mut(&number) {
            what(&mut element.machine);
        }
    }

    /// Handles an event of an element's machine.
    pub(super) fn element_event(&mut self, number: u64, event: Event) {
        let Some(element) = self.elements.get(&number) else {
            return;
        };
        let handle = &element.handle;
        let words = |causes: &[Cause]| causes.iter().map(Cause::to_string).collect::<Vec<_>>();
        let told = match event {
            Event::Registered { id, warnings } => {
                tracing::info!(%handle, %id, "registered");
                ElementEvent::Registered {
                    id: id.to_string(),
                    at: crate::entries::transport(&element.at).1,
                    warnings: words(&warnings),
                }
            }
            Event::Refused(refusal) => {
                tracing::warn!(%handle, %refusal, "not registered");
                let reason = refusal.to_string();
                return self.element_over(number, ElementEvent::Refused { reason });
            }
            Event::Left(departure) => {
                let departure = match departure {
                    pool_element::Departure::Confirmed => Departure::Confirmed,
                    pool_element::Departure::TimedOut => Departure::TimedOut,
                    pool_element::Departure::Refused(causes) => Departure::Refused {
                        reason: words(&causes).join(", "),
                    },
                };
                tracing::info!(%handle, ?departure, "left");
                return self.element_over(number, ElementEvent::Left(departure));
            }
            Event::Expired => ElementEvent::Expired,
            Event::NewHome { registrar } => {
                tracing::info!(%handle, ?registrar, "a home registrar");
                let registrar = registrar.map(|id| id.to_string());
                ElementEvent::Home { registrar }
            }
            Event::HomeLost => {
                tracing::warn!(%handle, "the home registrar is lost");
                ElementEvent::HomeLost
            }
            Event::NoRegistrar => ElementEvent::NoRegistrar,
            Event::Unanswered { attempts } => {
                return tracing::warn!(%handle, attempts, "registrations without an answer");
            }
            Event::Reported(causes) => {
                return tracing::warn!(%handle, ?causes, "a registrar reports errors");
            }
        };
        self.programs.tell(number, &FromPool::Element(told));
    }

    fn element_over(&mut self, number: u64, last: ElementEvent) {
        self.programs.tell_and_end(number, &FromPool::Element(last));
        // The element's endpoint is dropped too, and reports no more events of its associations.
        if let Some(element) = self.elements.remove(&number) {
            self.forget_name(number, &element);
            let addresses = element
                .service
                .iter()
                .flat_map(|service| &service.addresses);
            for address in addresses {
                self.services.remove(address);
            }
        }
        for place in self.links.places_of(number) {
            self.stalled.remove(&place);
            self.links.down(place);
        }
    }

    /// Handles a new association of a user with an element.
    pub(super) fn user_came(&mut self, place: Place, from: Vec<SocketAddr>) {
        let number = place.endpoint;
        let owner = Owner::Service(number);
        let Some(link) = self.links.name_for(owner, place) else {
            return;
        };
        let Some(service) = self.service_of(number) else {
            return;
        };
        if service.users.len() >= USERS_MAX {
            tracing::warn!(element = number, "more users than an element may have");
            return self.abort(place);
        }
        service.users.insert(link);
        service.sessions.handle_connected(link);
        let session = session_number(link);
        let event = ElementEvent::Connected { session, from };
        self.programs.tell(number, &FromPool::Element(event));
        self.carry_out(owner);
    }

    /// Returns the service of an element.
    pub(super) fn service_of(&mut self, number: u64) -> Option<&mut Service> {
        self.elements.get_mut(&number)?.service.as_mut()
    }

    /// Handles a message on a user's control channel.
    pub(super) fn session_message(&mut self, number: u64, link: Link, message: Message) {
        if let Some(service) = self.service_of(number) {
            service.sessions.handle_message(link, message);
        }
    }

    /// Handles the end of a user's association.
    pub(super) fn session_lost(&mut self, number: u64, link: Link) {
        let Some(service) = self.service_of(number) else {
            return;
        };
        service.sessions.handle_lost(link);
        if service.users.remove(&link) {
            let session = session_number(link);
            let event = ElementEvent::Closed { session };
            self.programs.tell(number, &FromPool::Element(event));
        }
    }

    /// Handles an event of a control channel.
    pub(super) fn service_event(&mut self, number: u64, event: SessionEvent) {
        match event {
            SessionEvent::Resumed { link, state } => {
                let event = ElementEvent::Resumed {
                    session: session_number(link),
                    state: state.to_vec(),
                };
                self.programs.tell(number, &FromPool::Element(event));
            }
            SessionEvent::Disbelieved { link, error } => {
                tracing::warn!(session = session_number(link), %error, "a user's state");
            }
            SessionEvent::LateCookie { link } => {
                tracing::debug!(session = session_number(link), "a second cookie");
            }
            SessionEvent::PeerCard { .. } => {}
        }
    }
}

/// Returns a machine's configuration for finding registrars.
pub(super) fn hunt(config: &PoolConfig) -> HuntConfig {
    let known = config.known_registrars();
    let transport = |at: &RegistrarAt| match at.over {
        None => Transport::Sctp(data_transport(&[at.address])),
        // The daemon decides whether to use TLS.
        Some(_) => Transport::Tcp {
            port: at.address.port(),
            usage: TransportUse::DataOnly,
            address: at.address.ip(),
        },
    };
    let mut hunt = HuntConfig::new(known.iter().map(transport).collect());
    hunt.trust_announces = config.announces.believed;
    hunt
}

/// Returns the number of a user's session for the element's program.
pub(super) fn session_number(link: Link) -> u64 {
    match link {
        Link::Ours(number) | Link::Theirs(number) => number,
    }
}
