//! Reads an operator's error about a driver from the status of the operator's resource.
//!
//! Sources: Network Operator `controllers/nic_policy_helpers.go` (`status.appliedStates`, with a message for each component)
//! and GPU Operator `internal/conditions` (the condition `Error`).

use farrier_core::image::OperatorResource;
use serde_json::Value;

use super::errors::one_line;

/// Name of the driver's component in the status of the Network Operator's resources.
const OFED_STATE: &str = "state-OFED";
/// Reasons of the GPU Operator's condition `Error` that mean a failure. Other reasons mean that pods are not ready yet.
const FAILURES: [&str; 2] = ["ReconcileFailed", "ConflictingNodeSelector"];

/// Returns the operator's message if it could not apply the driver of a resource with this `status`.
pub(super) fn operator_error(kind: OperatorResource, status: &Value) -> Option<String> {
    let message = match kind {
        OperatorResource::NicClusterPolicy | OperatorResource::NicNodePolicy => {
            let failed = |state: &&Value| state["name"] == OFED_STATE && state["state"] == "error";
            &status["appliedStates"].as_array()?.iter().find(failed)?["message"]
        }
        OperatorResource::ClusterPolicy | OperatorResource::NvidiaDriver => {
            let failed = |condition: &&Value| {
                condition["type"] == "Error"
                    && condition["status"] == "True"
                    && FAILURES.iter().any(|reason| condition["reason"] == *reason)
            };
            &status["conditions"].as_array()?.iter().find(failed)?["message"]
        }
        OperatorResource::GpuCluster | OperatorResource::Module => return None,
    };
    message.as_str().map(one_line).filter(|message| !message.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_network_operators_error_is_the_drivers_and_not_another_components() {
        let status = json!({"state": "error", "appliedStates": [
            {"name": "state-multus-cni", "state": "error", "message": "no multus"},
            {"name": "state-OFED", "state": "error",
             "message": "ForcePrecompiled is enabled and precompiled tag was not found: 1-6.1-debian12-amd64\n"},
        ]});
        let expected = "ForcePrecompiled is enabled and precompiled tag was not found: 1-6.1-debian12-amd64";
        for kind in [OperatorResource::NicClusterPolicy, OperatorResource::NicNodePolicy] {
            assert_eq!(operator_error(kind, &status).as_deref(), Some(expected));
        }
        assert_eq!(operator_error(OperatorResource::ClusterPolicy, &status), None);
        for state in ["ready", "notReady", "ignore"] {
            let status = json!({"appliedStates": [{"name": "state-OFED", "state": state, "message": "m"}]});
            assert_eq!(operator_error(OperatorResource::NicClusterPolicy, &status), None, "{state}");
        }
    }

    #[test]
    fn a_gpu_operator_that_waits_for_pods_has_no_error() {
        let status = |status: &str, reason: &str| {
            json!({"state": "notReady", "conditions": [
                {"type": "Ready", "status": "False", "reason": "Error", "message": ""},
                {"type": "Error", "status": status, "reason": reason, "message": "why"},
            ]})
        };
        let error = |status: &Value| operator_error(OperatorResource::NvidiaDriver, status);
        for reason in FAILURES {
            assert_eq!(error(&status("True", reason)).as_deref(), Some("why"));
            assert_eq!(error(&status("False", reason)), None);
        }
        for reason in ["DriverNotReady", "OperandNotReady", "Reconciled"] {
            assert_eq!(error(&status("True", reason)), None, "{reason}");
        }
    }

    #[test]
    fn a_status_of_another_form_has_no_error() {
        for status in [
            json!(null),
            json!({}),
            json!({"appliedStates": 1, "conditions": "x"}),
            json!({"appliedStates": [1], "conditions": [null]}),
        ] {
            for kind in OperatorResource::TARGETS {
                assert_eq!(operator_error(kind, &status), None, "{status}");
            }
        }
    }
}
