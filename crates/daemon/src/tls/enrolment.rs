//! TLS of the enrolment port: only the node shows a certificate, and sends the authority's along.

use std::sync::Arc;

use holdfast_api::enrolment::ALPN_PROTOCOL;
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ServerConfig, version::TLS13};

use super::{TlsError, file_error, mismatch, read_certificates};
use crate::config::TlsConfig;

/// Returns the configuration with the files of `config`.
///
/// # Errors
/// A file is missing or damaged, or the files do not fit each other.
pub fn enrolment_server_config(config: &TlsConfig) -> Result<Arc<ServerConfig>, TlsError> {
    let mut chain = read_certificates(&config.cert)?;
    // A new host knows the authority by a digest alone.
    chain.extend(read_certificates(&config.ca)?);
    let key = PrivateKeyDer::from_pem_file(&config.key).map_err(file_error(&config.key))?;
    let mut server = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .map_err(mismatch)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(mismatch)?;
    server.alpn_protocols = vec![ALPN_PROTOCOL.to_vec()];
    server.send_tls13_tickets = 0;
    Ok(Arc::new(server))
}
