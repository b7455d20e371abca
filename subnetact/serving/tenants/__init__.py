"""Tenants: several supernets (`Tenant`) on the same workers (`TenantBatcher`)."""
